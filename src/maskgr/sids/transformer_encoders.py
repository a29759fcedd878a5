"""Transformer encoders: sentence-transformers models, and any Hugging Face encoder (such as the
paper's Flan-T5) mean-pooled over real tokens."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maskgr.devices import pick_device
from maskgr.errors import RequestError
from maskgr.sids.config import EncoderConfig
from maskgr.sids.vectors import Floats

if TYPE_CHECKING:
    import torch

Encode = Callable[[list[str]], Floats]


def identity(model: str, config: EncoderConfig, device: str, pooling: str) -> dict[str, Any]:
    """Everything that determines the vectors of this model."""
    return {
        "encoder": config.encoder,
        "files": _fingerprint(Path(model)),
        "max_tokens": config.max_tokens,
        "dtype": _dtype_name(config, pick_device(device)),
        "pooling": pooling,
    }


def load_huggingface(model: str, config: EncoderConfig, device: str) -> Encode:
    """A Hugging Face encoder (or the encoder half of an encoder-decoder), mean-pooled."""
    transformers = _package("transformers")
    target = pick_device(device)
    with _loading(model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        network = _text_encoder(transformers, model, _dtype_name(config, target))
    network = network.to(target).eval()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # any token would do: padding is masked
    limit = _token_limit(config.max_tokens, tokenizer, network.config)

    def encode(texts: list[str]) -> Floats:
        tokens = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
        with _memory_advice(config):
            return _by_length(network, tokens, tokenizer.pad_token_id, config.batch_size, target)

    return encode


def load_sentence_transformer(model: str, config: EncoderConfig, device: str) -> Encode:
    package = _package("sentence_transformers")
    target = pick_device(device)
    with _loading(model):
        network = package.SentenceTransformer(
            model, device=str(target), model_kwargs={"dtype": _dtype_name(config, target)}
        )
    own_limit = network.max_seq_length
    network.max_seq_length = min(config.max_tokens, own_limit or config.max_tokens)

    def encode(texts: list[str]) -> Floats:
        with _memory_advice(config):
            vectors = network.encode(
                texts,
                batch_size=config.batch_size,
                convert_to_tensor=True,  # numpy has no bfloat16
                show_progress_bar=False,
            )
        return np.asarray(vectors.float().cpu().numpy(), dtype=np.float32)  # (texts, d)

    return encode


def _text_encoder(transformers: Any, model: str, dtype: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(model)
    # The T5 family has classes that read only the encoder's weights from a checkpoint (half of
    # Flan-T5-XXL). Other encoder-decoders are read whole, and the decoder is dropped.
    if type(config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
        return transformers.AutoModelForTextEncoding.from_pretrained(model, dtype=dtype)
    network = transformers.AutoModel.from_pretrained(model, dtype=dtype)
    return network.get_encoder() if config.is_encoder_decoder else network


def _token_limit(max_tokens: int, tokenizer: Any, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or max_tokens
    return int(min(max_tokens, tokenizer.model_max_length, positions))


def _by_length(
    network: Any, tokens: list[list[int]], pad: int, batch_size: int, device: torch.device
) -> Floats:
    """(texts, d) in the order of `tokens`; batches have similar lengths, so little is padded."""
    order = np.argsort([-len(ids) for ids in tokens], kind="stable")
    batches = [
        _mean_pooled(network, [tokens[i] for i in order[start : start + batch_size]], pad, device)
        for start in range(0, len(order), batch_size)
    ]
    pooled = np.concatenate(batches)  # (texts, d)
    vectors = np.empty_like(pooled)
    vectors[order] = pooled
    return vectors


def _mean_pooled(network: Any, tokens: list[list[int]], pad: int, device: torch.device) -> Floats:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(row, dtype=torch.long, device=device) for row in tokens]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)  # (batch, length)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.inference_mode():
        hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state
        real = mask.unsqueeze(-1)  # (batch, length, 1)
        # float32 before the sum: half precision loses digits over hundreds of tokens.
        pooled = hidden.float().mul(real).sum(dim=1) / real.sum(dim=1)  # (batch, d)
    return np.asarray(pooled.cpu().numpy(), dtype=np.float32)


def _dtype_name(config: EncoderConfig, device: torch.device) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if device.type == "cuda" else "float32"


def _fingerprint(folder: Path) -> str | None:
    """Names, sizes and dates of a local model's files; None for a name on a hub."""
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    stats = [(str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RequestError(
            f"this encoder needs the package {name.replace('_', '-')}; "
            "install it with: pip install 'maskgr[text]'"
        ) from error


@contextlib.contextmanager
def _loading(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if Path(model).is_dir() or not isinstance(error, OSError):
            raise RequestError(
                f"{model} cannot be loaded as an encoder ({reason}); fix it, or name another model"
            ) from error
        raise RequestError(
            f"the model {model!r} is not on this machine and cannot be fetched ({reason}); check "
            "its name and the network, or fetch it elsewhere and give the path of its folder"
        ) from error


@contextlib.contextmanager
def _memory_advice(config: EncoderConfig) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RequestError(
            f"{config.encoder} ran out of memory with batches of {config.batch_size} texts; "
            "give a smaller batch_size or max_tokens, or dtype bfloat16"
        ) from error
