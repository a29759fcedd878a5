"""Encoders against computations by hand, on models made on the spot; nothing needs a network."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's package is imported: before all else

import numpy as np
import polars as pl
import pytest

from maskgr.errors import DataError, RequestError
from maskgr.sids import encoder_cache, encoders, transformer_encoders
from maskgr.sids.config import EncoderConfig
from maskgr.sids.encoders import embed_items, encode_items

WORDS = ["red", "blue", "green", "nail", "polish", "cream", "brush", "for", "face", "and", "hair"]
TEXTS = [" ".join(WORDS[i : i + n]) for n in (1, 4, 9, 2) for i in range(4)]
SPECIAL = ["<pad>", "</s>", "<unk>"]


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def ids(text: str) -> list[int]:
    """What the tokenizer above gives, by hand."""
    return [(SPECIAL + WORDS).index(word) for word in text.split()] + [1]


def save_network(network: Any, folder: Path) -> Path:
    network.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    return save_network(T5ForConditionalGeneration(config), tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=6,
    )
    return save_network(BertModel(config), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def tiny_bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=20,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
    )
    return save_network(BartModel(config), tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def tiny_sentence_transformer(
    tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tiny_bert), device="cpu")  # of itself adds a mean
    model.max_seq_length = 5
    folder = tmp_path_factory.mktemp("st")
    model.save(str(folder))
    return folder, model


def by_hand(encoder: Any, max_tokens: int = 512) -> np.ndarray:
    """One text at a time, so without padding, and the plain mean over its tokens."""
    import torch

    rows = []
    for text in TEXTS:
        tokens = ids(text)
        if len(tokens) > max_tokens:
            tokens = [*tokens[: max_tokens - 1], 1]
        with torch.no_grad():
            hidden = encoder.eval()(torch.tensor([tokens])).last_hidden_state
        rows.append(hidden[0].mean(dim=0).numpy())
    return np.stack(rows)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=1e-5))


def encode(encoder: str, **options: Any) -> np.ndarray:
    return encode_items(TEXTS, EncoderConfig(encoder, **options), device="cpu")


# --- WordLlama


def test_wordllama_is_the_mean_of_its_word_vectors() -> None:
    import wordllama
    from safetensors.numpy import load_file

    vectors = encode_items(TEXTS, EncoderConfig())
    assert vectors.shape == (len(TEXTS), 256)
    assert vectors.dtype == np.float32
    folder = Path(wordllama.__file__).parent
    weights = load_file(next(folder.glob("weights/*_256.safetensors")))["embedding.weight"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(next(folder.glob("tokenizers/*.json"))))
    for text, vector in zip(TEXTS, vectors, strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        assert np.allclose(vector, weights[tokens].astype(np.float32).mean(axis=0), atol=1e-6)


def test_wordllama_gives_a_text_the_same_vector_in_any_company() -> None:
    together = encode_items(TEXTS, EncoderConfig())
    alone = [encode_items([text], EncoderConfig(batch_size=1))[0] for text in TEXTS[::4]]
    assert np.array_equal(together[::4], np.stack(alone))


def test_wordllama_cuts_long_texts() -> None:
    long = encode_items(["red " * 50 + "blue " * 50], EncoderConfig(max_tokens=3))
    short = encode_items(["red red red"], EncoderConfig())
    assert close(long, short)


def test_wordllama_leaves_the_root_logger_alone() -> None:
    program = (
        "import logging; from maskgr.sids.config import EncoderConfig;"
        "from maskgr.sids.encoders import encode_items;"
        "encode_items(['a'], EncoderConfig());"
        "assert not logging.root.handlers and logging.root.level == logging.WARNING"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=with_source())
    assert logging.root.level == logging.WARNING


def test_importing_the_encoders_imports_nothing_heavy() -> None:
    program = (
        "import sys, maskgr.sids.encoders;"
        "heavy = {'torch', 'transformers', 'wordllama', 'sentence_transformers'};"
        "assert not heavy & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=with_source())


def with_source() -> dict[str, str]:
    source = str(Path(encoders.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": source}


# --- Hugging Face


def test_t5_is_pooled_over_real_tokens_of_the_encoder(tiny_t5: Path) -> None:
    from transformers import T5ForConditionalGeneration

    expected = by_hand(T5ForConditionalGeneration.from_pretrained(tiny_t5).get_encoder())
    assert close(encode(f"huggingface:{tiny_t5}"), expected)
    assert close(encode(f"huggingface:{tiny_t5}", batch_size=3), expected)


def test_only_the_encoder_of_t5_is_loaded(tiny_t5: Path) -> None:
    import transformers

    network = transformer_encoders._text_encoder(transformers, str(tiny_t5), "float32")
    assert type(network).__name__ == "T5EncoderModel"
    assert not any("decoder" in name for name, _ in network.named_parameters())


def test_texts_are_cut_at_max_tokens(tiny_t5: Path) -> None:
    from transformers import T5EncoderModel

    expected = by_hand(T5EncoderModel.from_pretrained(tiny_t5), max_tokens=3)
    assert close(encode(f"huggingface:{tiny_t5}", max_tokens=3), expected)


def test_bert_is_cut_at_its_own_last_position(tiny_bert: Path) -> None:
    from transformers import BertModel

    expected = by_hand(BertModel.from_pretrained(tiny_bert), max_tokens=6)
    assert close(encode(f"huggingface:{tiny_bert}", batch_size=5), expected)


def test_decoder_of_other_encoder_decoders_is_dropped(tiny_bart: Path) -> None:
    from transformers import BartModel

    expected = by_hand(BartModel.from_pretrained(tiny_bart).get_encoder())
    assert close(encode(f"huggingface:{tiny_bart}", batch_size=5), expected)


def test_half_precision_comes_back_as_float32_and_near(tiny_t5: Path) -> None:
    full = encode(f"huggingface:{tiny_t5}")
    half = encode(f"huggingface:{tiny_t5}", dtype="bfloat16")
    assert half.dtype == np.float32
    assert not np.array_equal(half, full)
    assert np.abs(half - full).max() < 0.05 * np.abs(full).max()


def test_automatic_precision_follows_the_device() -> None:
    import torch

    config = EncoderConfig()
    assert transformer_encoders._dtype_name(config, torch.device("cpu")) == "float32"
    assert transformer_encoders._dtype_name(config, torch.device("cuda")) == "bfloat16"
    assert transformer_encoders._dtype_name(config, torch.device("mps")) == "float32"


def test_raises_with_advice_when_memory_runs_out(
    tiny_t5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(transformer_encoders, "_mean_pooled", full)
    with pytest.raises(RequestError, match="batches of 64 texts; give a smaller batch_size"):
        encode(f"huggingface:{tiny_t5}")


# --- sentence-transformers


def test_sentence_transformers_are_used_as_they_are(
    tiny_sentence_transformer: tuple[Path, Any], tiny_bert: Path
) -> None:
    from transformers import BertModel

    folder, model = tiny_sentence_transformer
    vectors = encode(f"sentence-transformers:{folder}", batch_size=3)
    assert close(vectors, np.stack([model.encode(text) for text in TEXTS]))
    bert = BertModel.from_pretrained(tiny_bert)
    assert close(vectors, by_hand(bert, max_tokens=5))  # the limit it was saved with
    short = encode(f"sentence-transformers:{folder}", max_tokens=2)
    assert close(short, by_hand(bert, max_tokens=2))


# --- requests that cannot be met


@pytest.mark.parametrize("backend", ["huggingface", "sentence-transformers"])
def test_raises_when_a_model_is_not_on_this_machine(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for long
    with pytest.raises(RequestError) as caught:
        encode(f"{backend}:nobody/nothing-t5")
    message = str(caught.value)
    assert "'nobody/nothing-t5' is not on this machine and cannot be fetched" in message
    assert message.endswith("give the path of its folder")
    assert "\n" not in message


@pytest.mark.parametrize("backend", ["huggingface", "sentence-transformers"])
def test_raises_when_a_folder_holds_no_model(backend: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RequestError, match=f"{tmp_path} cannot be loaded as an encoder"):
        encode(f"{backend}:{tmp_path}")


@pytest.mark.parametrize(
    ("backend", "package"),
    [("huggingface", "transformers"), ("sentence-transformers", "sentence_transformers")],
)
def test_raises_when_a_package_is_missing(
    backend: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RequestError, match=r"pip install 'maskgr\[text\]'"):
        encode(f"{backend}:x")


@pytest.mark.parametrize(
    ("device", "message"), [("gpu", "no device 'gpu'"), ("mps", "no mps device here")]
)
def test_raises_when_the_device_is_not_there(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RequestError, match=message):
        encode_items(["a"], EncoderConfig("huggingface:x"), device=device)


# --- the cache


class Counting:
    """An encoder that notes what it is asked, and can fail, with vectors of its own."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fail_at: int | None = None

    def __call__(self, texts: list[str]) -> np.ndarray:
        if self.fail_at is not None and len(self.asked) + len(texts) > self.fail_at:
            raise KeyboardInterrupt
        self.asked += texts
        return self.vectors(texts)

    @staticmethod
    def vectors(texts: list[str]) -> np.ndarray:
        return np.array([[len(t), sum(map(ord, t)), 1] for t in texts], dtype=np.float32)

    def since(self) -> list[str]:
        asked, self.asked = self.asked, []
        return sorted(asked)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    encoder = Counting()
    monkeypatch.setattr(encoders, "_load_wordllama", lambda config: encoder)
    return encoder


SMALL = EncoderConfig(batch_size=1)  # calls of a few texts each
LETTERS = [letter * n for n, letter in enumerate("abcdefghijklmnop", start=1)]


def parts(cache: Path) -> list[Path]:
    return sorted(cache.glob("wordllama-*/part-*.safetensors"))


def test_equal_texts_are_encoded_once_and_order_is_kept(counting: Counting) -> None:
    texts = ["b", "aaa", "b", "cc", "aaa"]
    vectors = encode_items(texts, SMALL)
    assert counting.since() == ["aaa", "b", "cc"]
    assert np.array_equal(vectors, Counting.vectors(texts))


def test_only_new_and_changed_texts_are_encoded(counting: Counting, tmp_path: Path) -> None:
    encode_items(LETTERS, SMALL, cache=tmp_path)
    assert counting.since() == sorted(LETTERS)
    again = encode_items(LETTERS[::-1], SMALL, cache=tmp_path)
    assert counting.since() == []
    assert np.array_equal(again, Counting.vectors(LETTERS[::-1]))
    texts = ["new", *LETTERS[:5], "changed", *LETTERS[6:]]
    assert np.array_equal(encode_items(texts, SMALL, cache=tmp_path), Counting.vectors(texts))
    assert counting.since() == ["changed", "new"]
    encode_items(LETTERS, SMALL)
    assert counting.since() == sorted(LETTERS)  # no cache was given


def test_a_wholly_cached_call_does_not_load_the_model(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_items(LETTERS, SMALL, cache=tmp_path)
    monkeypatch.setattr(encoders, "_load_wordllama", None)
    encode_items(LETTERS, SMALL, cache=tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
    ids=["truncated", "empty", "one bit flipped"],
)
def test_a_damaged_part_is_encoded_again(
    damage: Callable[[bytes], bytes],
    counting: Counting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_cache, "PART_BYTES", 1)  # a part a call: four texts
    encode_items(LETTERS, SMALL, cache=tmp_path)
    counting.since()
    assert len(parts(tmp_path)) == 4
    part = parts(tmp_path)[0]
    part.write_bytes(damage(part.read_bytes()))
    with pytest.warns(UserWarning, match="are damaged; they are computed again"):
        vectors = encode_items(LETTERS, SMALL, cache=tmp_path)
    assert len(counting.since()) == 4
    assert np.array_equal(vectors, Counting.vectors(LETTERS))
    encode_items(LETTERS, SMALL, cache=tmp_path)
    assert counting.since() == []


def test_warns_when_the_cache_cannot_be_written(counting: Counting, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    with pytest.warns(UserWarning, match="vectors are not cached: cannot write"):
        vectors = encode_items(LETTERS, SMALL, cache=tmp_path / "file")
    assert np.array_equal(vectors, Counting.vectors(LETTERS))


def test_an_interrupted_run_continues_where_it_stopped(counting: Counting, tmp_path: Path) -> None:
    counting.fail_at = 9
    with pytest.raises(KeyboardInterrupt):
        encode_items(LETTERS, SMALL, cache=tmp_path)
    done = counting.since()
    assert len(done) == 8
    counting.fail_at = None
    vectors = encode_items(LETTERS, SMALL, cache=tmp_path)
    assert counting.since() == sorted(set(LETTERS) - set(done))
    assert np.array_equal(vectors, Counting.vectors(LETTERS))


def test_a_killed_run_loses_only_vectors_not_yet_written(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_cache, "PART_SECONDS", 0.0)
    monkeypatch.setattr(encoder_cache.EncoderCache, "__exit__", lambda *_: None)
    counting.fail_at = 9
    with pytest.raises(KeyboardInterrupt):
        encode_items(LETTERS, SMALL, cache=tmp_path)
    counting.fail_at = None
    counting.since()
    encode_items(LETTERS, SMALL, cache=tmp_path)
    assert len(counting.since()) == 8


def test_cache_key_holds_everything_that_determines_the_vectors(
    counting: Counting, tmp_path: Path, tiny_t5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_items(["a"], SMALL, cache=tmp_path)
    encode_items(["a"], replace(SMALL, max_tokens=7), cache=tmp_path)
    assert counting.since() == ["a", "a"]
    encode_items(["a"], replace(SMALL, batch_size=9, template="{title}"), cache=tmp_path)
    assert counting.since() == []

    monkeypatch.setattr(transformer_encoders, "load_huggingface", lambda *_: counting)
    t5 = EncoderConfig(f"huggingface:{tiny_t5}")
    for config in (t5, replace(t5, dtype="bfloat16"), replace(t5, max_tokens=7)):
        encode_items(["a"], config, device="cpu", cache=tmp_path)
        assert counting.since() == ["a"]
    encode_items(["a"], replace(t5, dtype="float32"), device="cpu", cache=tmp_path)
    assert counting.since() == []  # what "auto" was on this device
    os.utime(tiny_t5 / "config.json")  # the model in the folder is another one now
    encode_items(["a"], t5, device="cpu", cache=tmp_path)
    assert counting.since() == ["a"]


def test_raises_with_the_row_when_a_vector_is_nan_and_caches_nothing(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Counting.vectors(["a", "b", "c"])
    broken[0, 1] = np.nan  # the longest text comes first
    monkeypatch.setattr(encoders, "_load_wordllama", lambda config: lambda texts: broken)
    with pytest.raises(DataError, match=r"wordllama gave NaN or infinity for row 2 \('ccc'\)"):
        encode_items(["a", "a", "ccc", "bb"], SMALL, cache=tmp_path)
    assert parts(tmp_path) == []


def test_progress_goes_to_stderr_and_only_when_asked(
    counting: Counting, capfd: pytest.CaptureFixture[str]
) -> None:
    encode_items(LETTERS, SMALL)
    assert capfd.readouterr() == ("", "")
    encode_items(LETTERS, SMALL, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "16/16" in err


# --- a given matrix, and the whole way from the table


IDS = ["i0", "i1", "i2"]
GOOD = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.float64)


def test_items_are_embedded_by_template_or_given_matrix(counting: Counting) -> None:
    items = pl.DataFrame({"item_id": IDS, "title": ["x", "yy", "zzz"]})
    assert np.array_equal(
        embed_items(items, replace(SMALL, template="<{title}>")),
        Counting.vectors(["<x>", "<yy>", "<zzz>"]),
    )
    own = EncoderConfig(encoder="embeddings")
    assert np.array_equal(embed_items(items, own, embeddings=GOOD), GOOD)
    with pytest.raises(RequestError, match=r"the dataset has none; put embeddings\.npy"):
        embed_items(items, own)
    with pytest.raises(DataError, match="the dataset's matrix has 2 rows for 3"):
        embed_items(items, own, embeddings=GOOD[:2])
    blank = items.with_columns(title=pl.Series(["x", None, "z"]))
    with pytest.warns(UserWarning, match="1 of 3 items have no text \\(first: 'i1'\\); they get"):
        found = embed_items(blank, replace(SMALL, template="<{title}>"))
    assert np.array_equal(found[[0, 2]], Counting.vectors(["<x>", "<z>"]))
    assert np.array_equal(found[1], found[[0, 2]].mean(0))
    with pytest.raises(DataError, match="none of the 3 items has text; fill in a column"):
        embed_items(items.with_columns(title=pl.lit(" ")), SMALL)
    with pytest.raises(DataError, match="there are no items to encode"):
        embed_items(items.clear(), SMALL)
