"""Settings that make no sense: one sentence over the command and in Python, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import pytest

from maskgr.data.config import SyntheticConfig
from maskgr.errors import RequestError
from maskgr.models.base import MODELS, model_class, train_config
from maskgr.settings import apply_settings, setting_paths
from tests.conftest import Outcome

# The model, a setting of its smallest preset, and the start of what the error says.
TABLE = [
    ("maskgr", "width=-8", "width is -8; give a whole number from 1 to 65,536"),
    ("maskgr", "width=0", "width is 0; give a whole number"),
    ("maskgr", "width=1000000", "width is 1000000; give a whole number"),
    ("maskgr", "width=30", "a width of 30 cannot be shared evenly by 2 heads; use a multiple of 4"),
    ("maskgr", "layers=-1", "layers is -1; give a whole number from 1 to 1,000"),
    ("maskgr", "heads=0", "heads is 0; give a whole number"),
    ("maskgr", "transformer.hidden=-5", "hidden is -5; give a whole number"),
    ("maskgr", "dropout=1", "dropout is 1.0; give a number from 0 to 0.99"),
    ("maskgr", "dropout=-0.1", "dropout is -0.1; give a number"),
    ("maskgr", "dropout=nan", "dropout is nan; give a number"),
    ("maskgr", "learning_rate=1e9", "fit.learning_rate is 1000000000.0; give a number from 0 to 1"),
    ("maskgr", "learning_rate=-1", "fit.learning_rate is -1.0; give a number"),
    ("maskgr", "learning_rate=nan", "fit.learning_rate is nan; give a number"),
    ("maskgr", "fit.steps=0", "fit.steps is 0; give a whole number from 1 to 1,000,000,000"),
    ("maskgr", "fit.steps=-4", "fit.steps is -4; give a whole number"),
    ("maskgr", "fit.steps=1e3", "--set fit.steps=1e3: '1e3' is not a valid int"),
    ("maskgr", "fit.minutes=-1", "fit.minutes is -1.0; give a number from 0 to 1,000,000"),
    ("maskgr", "fit.minutes=inf", "fit.minutes is inf; give a number"),
    (
        "maskgr",
        "fit.minutes=1e-9",
        "fit.minutes is 1e-09, which leaves no time to train; give 0.01",
    ),
    ("maskgr", "token_budget=0", "fit.token_budget is 0; give a whole number"),
    ("maskgr", "accumulate=0", "fit.accumulate is 0; give a whole number"),
    ("maskgr", "warmup=1", "fit.warmup is 1.0; give a number from 0 to 0.99"),
    ("maskgr", "weight_decay=-0.1", "fit.weight_decay is -0.1; give a number"),
    ("maskgr", "weight_decay=1e6", "fit.weight_decay is 1000000.0; give a number"),
    ("maskgr", "clip=0", "fit.clip is 0.0; give a number from 1e-06 to 1,000,000.0"),
    ("maskgr", "ema=1", "fit.ema is 1.0; give a number"),
    ("maskgr", "validations=0", "fit.validations is 0; give a whole number"),
    ("maskgr", "validation_users=0", "fit.validation_users is 0; give a whole number"),
    ("maskgr", "patience=-1", "fit.patience is -1; give a whole number"),
    ("maskgr", "checkpoint_minutes=-1", "fit.checkpoint_minutes is -1.0; give a number"),
    ("maskgr", "leave_out=0", "leave_out is 0; give a whole number from 1 to 1,000"),
    ("maskgr", "leave_out=-2", "leave_out is -2; give a whole number"),
    ("maskgr", "sparsify=1", "sparsify is 1.0; give a number from 0 to 0.99"),
    ("maskgr", "sparsify=-0.5", "sparsify is -0.5; give a number"),
    ("maskgr", "history_limit=0", "history_limit is 0; give a whole number"),
    ("maskgr", "history_limit=9999999", "history_limit is 9999999; give a whole number"),
    ("maskgr", "seed=-1", "seed is -1; give a whole number from 0 to 2,147,483,647"),
    ("maskgr", "seed=99999999999999999999", "seed is 99999999999999999999; give a whole number"),
    ("maskgr", "session=0", "session is 0; give a whole number from 1 to 100"),
    ("maskgr", "neighbours=-1", "neighbours is -1; give a whole number"),
    ("maskgr", "negatives=0", "negatives is 0; give a whole number"),
    ("maskgr", "denoiser_share=0", "denoiser_share is 0.0; give a number from 0.001 to 0.999"),
    ("maskgr", "denoiser_share=1", "denoiser_share is 1.0; give a number"),
    ("maskgr", "model.loss=bce", "--set model.loss=bce: use one of softmax, sampled"),
    ("maskgr", "levels=0", "levels is 0; give a whole number from 1 to 64"),
    ("maskgr", "levels=1000", "levels is 1000; give a whole number"),
    ("maskgr", "codes=1", "codes is 1; give a whole number from 2 to 1,000,000"),
    ("maskgr", "components=-1", "components is -1; give a whole number"),
    ("maskgr", "rqvae_latent=0", "rqvae_latent is 0; give a whole number"),
    ("maskgr", "rqvae_steps=0", "rqvae_steps is 0; give a whole number"),
    ("maskgr", "max_tokens=0", "max_tokens is 0; give a whole number"),
    ("maskgr", "encoder.batch_size=-1", "batch_size is -1; give a whole number"),
    ("maskgr", "beams=0", "decoding.beams is 0; give a whole number from 1 to 100,000"),
    ("maskgr", "beams=99999999", "decoding.beams is 99999999; give a whole number"),
    ("maskgr", "decoding.steps=-1", "decoding.steps is -1; give a whole number"),
    (
        "maskgr",
        "decoding.steps=9",
        "decoding.steps is 9, but semantic IDs have 3 digits; give 0 to",
    ),
    ("maskgr", "guidance=-1", "decoding.guidance is -1.0; give a number from 0 to 1,000"),
    ("maskgr", "remask=-1", "decoding.remask is -1; give a whole number"),
    (
        "maskgr-paper",
        "fixed_ratio=0",
        "objective.fixed_ratio is 0.0; give a number from 0.001 to 1",
    ),
    ("maskgr-paper", "last_item_share=2", "objective.last_item_share is 2.0; give a number"),
    ("maskgr-paper", "whole_item=-1", "objective.whole_item is -1.0; give a number"),
    ("maskgr-paper", "dense.layer=-1", "dense.layer is -1; give a whole number"),
    ("maskgr-paper", "dense.layer=9", "dense.layer is 9 in a network of 2 layers; use 0 to 2"),
    ("maskgr-paper", "dense.hidden=0", "dense.hidden is 0; give a whole number"),
    ("maskgr-paper", "rank=-1", "dense.rank is -1; give a whole number"),
    ("sasrec", "negatives=-1", "negatives is -1; give a whole number"),
    ("sasrec", "repeat_bias=maybe", "--set repeat_bias=maybe: 'maybe' is neither true nor false"),
    ("bert4rec", "mask_ratio=2", "mask_ratio is 2.0; give a number from 0 to 1"),
    ("bert4rec", "last_item_share=-1", "last_item_share is -1.0; give a number"),
    ("tiger", "decoder_layers=0", "decoder_layers is 0; give a whole number"),
    ("tiger", "head_width=-1", "head_width is -1; give a whole number"),
    ("liger", "text_hidden=0", "text_hidden is 0; give a whole number"),
    ("dreamrec", "temperature=0", "temperature is 0.0; give a number from 0.0001 to 100"),
    ("dreamrec", "diffusion_steps=0", "diffusion_steps is 0; give a whole number"),
    ("dreamrec", "null_share=1", "null_share is 1.0; give a number"),
    ("dreamrec", "sampling_steps=501", "sampling_steps is 501, more than the 500 diffusion_steps"),
    ("cadirec", "noised_share=1", "noised_share is 1.0; give a number"),
    ("cadirec", "nearest=0", "nearest is 0; give a whole number"),
    ("cadirec", "contrast_weight=-1", "contrast_weight is -1.0; give a number"),
    ("cadirec", "denoiser_dropout=2", "denoiser_dropout is 2.0; give a number"),
]


def smallest_preset(model: str) -> str:
    return next(iter(model_class(model).presets))


@pytest.mark.parametrize(("model", "setting", "expected"), TABLE)
def test_bad_settings_are_one_sentence(
    tmp_path: Path, maskgr: Callable[..., Outcome], model: str, setting: str, expected: str
) -> None:
    preset = smallest_preset(model)
    with pytest.raises(RequestError) as caught:
        train_config(preset, [setting], model=model)
    assert str(caught.value).startswith(expected)
    words = ("--model", model, "--preset", preset, "--set", setting, "--out", tmp_path / "run")
    outcome = maskgr("train", "synthetic", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: {caught.value}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--minutes", "0"], "--minutes 0 leaves no time to train; give 0.01 or more"),
        (["--minutes", "1e-9"], "--minutes 1e-09 leaves no time to train; give 0.01 or more"),
        (["--minutes", "-5"], "--minutes -5 leaves no time to train; give 0.01 or more"),
        (["--minutes", "nan"], "--minutes nan leaves no time to train; give 0.01 or more"),
        (["--minutes", "inf"], "fit.minutes is inf; give a number"),
        (["--seed", "-1"], "seed is -1; give a whole number from 0 to 2,147,483,647"),
        (["--seed", "99999999999999999999"], "seed is 99999999999999999999; give a whole number"),
        (["--seed", "1.5"], "Invalid value for '--seed': "),
        (["--k-core", "-3"], "Invalid value for '--k-core': "),
    ],
)
def test_bad_options_of_train_are_one_sentence(
    tmp_path: Path, maskgr: Callable[..., Outcome], words: list[str], expected: str
) -> None:
    outcome = maskgr("train", "synthetic", "--out", tmp_path / "run", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {expected}")
    assert outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [-1, 2**31, 2**70])
def test_semantic_ids_refuse_bad_seeds(
    tmp_path: Path, maskgr: Callable[..., Outcome], seed: int
) -> None:
    outcome = maskgr("sids", "synthetic", "--out", tmp_path / "sids", "--seed", seed)
    assert outcome.code == 2
    error = f"error: seed is {seed}; give a whole number from 0 to 2,147,483,647\n"
    assert outcome.err.endswith(error)
    assert not list(tmp_path.iterdir())


def numbers(config: Any) -> list[tuple[str, ...]]:
    """The paths of a configuration's numeric settings."""

    def value(path: tuple[str, ...]) -> Any:
        found = config
        for name in path:
            found = getattr(found, name)
        return found

    return [
        path
        for path in setting_paths(config)
        if isinstance(value(path), Real) and not isinstance(value(path), bool)
    ]


@pytest.mark.parametrize("model", [*MODELS, "synthetic"])
def test_every_number_has_bounds(model: str) -> None:
    """A setting that takes any number has been forgotten."""
    config: Any = SyntheticConfig()
    if model != "synthetic":
        config = train_config(smallest_preset(model), model=model)
    for path in numbers(config):
        for extreme in ("-1000000000000", "1000000000000000"):
            with pytest.raises(RequestError):
                apply_settings(config, [f"{'.'.join(path)}={extreme}"])


@pytest.mark.parametrize("model", MODELS)
def test_every_preset_is_within_its_bounds_after_a_way_through_json(model: str) -> None:
    for preset in model_class(model).presets.values():
        assert type(preset).from_dict(preset.to_dict()) == preset


@pytest.mark.parametrize("wrong", ["3", None, True, [1], 2.5])
def test_numbers_of_another_type_are_refused_in_python(wrong: Any) -> None:
    config = train_config("tiny")
    with pytest.raises(RequestError, match=r"seed is .*; give a whole number"):
        replace(config, seed=wrong)
    with pytest.raises(RequestError, match=r"fit\.steps is .*; give a whole number"):
        replace(config.fit, steps=wrong)
    if not isinstance(wrong, float):
        with pytest.raises(RequestError, match=r"fit\.learning_rate is .*; give a number"):
            replace(config.fit, learning_rate=wrong)
