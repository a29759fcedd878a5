from __future__ import annotations

from typing import Any, get_args

import pytest

from maskgr.errors import RequestError
from maskgr.sids.config import EncoderConfig, QuantizerConfig, QuantizerName, SidsConfig
from maskgr.sids.quantizers import QUANTIZERS


@pytest.mark.parametrize(
    ("config", "setting", "value", "message"),
    [
        (EncoderConfig, "encoder", "bert", "give auto, wordllama, embeddings, sentence-transf"),
        (EncoderConfig, "encoder", "huggingface:", "give auto"),
        (EncoderConfig, "max_tokens", 0, "give a whole number from 1 to "),
        (EncoderConfig, "batch_size", 0, "give a whole number from 1 to "),
        (EncoderConfig, "dtype", "fp8", "choose one of auto, float32, bfloat16, float16"),
        (QuantizerConfig, "quantizer", "zip", "choose one of residual-kmeans, rqvae, pq"),
        (QuantizerConfig, "levels", 0, "give a whole number from 1 to "),
        (QuantizerConfig, "levels", 2.5, "give a whole number from 1 to "),
        (QuantizerConfig, "codes", 1, "give a whole number from 2 to "),
        (QuantizerConfig, "components", -1, "give a whole number from 0 to "),
        (QuantizerConfig, "rqvae_latent", 0, "give a whole number from 1 to "),
        (QuantizerConfig, "rqvae_steps", 0, "give a whole number from 1 to "),
        (SidsConfig, "unique", "magic", "choose one of append, reassign, share"),
    ],
)
def test_raises_when_a_setting_is_impossible(
    config: Any, setting: str, value: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=f"^{setting} is {value!r}; {message}"):
        config(**{setting: value})


@pytest.mark.parametrize(
    "encoder", ["auto", "wordllama", "embeddings", "huggingface:a/b", "sentence-transformers:c:d"]
)
def test_every_kind_of_encoder_has_a_name(encoder: str) -> None:
    assert EncoderConfig(encoder).encoder == encoder


def test_quantizer_names_are_those_of_the_registry() -> None:
    assert set(get_args(QuantizerName)) == set(QUANTIZERS)
