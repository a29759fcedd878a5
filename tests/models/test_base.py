from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from maskgr.decoding.config import DecodingConfig
from maskgr.errors import RequestError
from maskgr.models.base import (
    CAPABILITIES,
    MODELS,
    AddsItems,
    Decodes,
    Model,
    PlansSessions,
    Samples,
    TrainConfig,
    capabilities,
    model_class,
    require,
    train_config,
)
from maskgr.models.maskgr.config import MaskGRConfig, PaperConfig
from maskgr.models.popularity import Popularity, PopularityConfig
from maskgr.models.sasrec import SASRecConfig
from maskgr.nn.transformer import TransformerConfig
from maskgr.settings import setting_paths
from maskgr.sids.config import QuantizerConfig, SidsConfig
from maskgr.training.fit import FitConfig

PRESETS = [
    pytest.param(config, id=f"{name}-{preset}")
    for name in MODELS
    for preset, config in model_class(name).presets.items()
]
MOST_SETTINGS = 60


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_what_a_model_needs(name: str) -> None:
    kind = model_class(name)
    members = [*Model.__annotations__, *(n for n in vars(Model) if not n.startswith("_"))]
    assert {"about", "presets", "learn", "rank", "save", "load"} <= set(members)
    assert [member for member in members if not hasattr(kind, member)] == []
    assert kind.presets
    assert all(config.name == name for config in kind.presets.values())
    assert all(isinstance(config.model, kind.Config) for config in kind.presets.values())
    assert kind.about[0] != kind.about[0].upper()  # stands behind the model's name
    assert not kind.about.endswith(".")


@pytest.mark.parametrize("config", PRESETS)
def test_config_survives_json(config: TrainConfig) -> None:
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_changed_config_survives_json() -> None:
    config = TrainConfig(
        "maskgr",
        MaskGRConfig(
            TransformerConfig(layers=3, width=24, heads=3, dropout=0.0),
            items="id",
            sids=SidsConfig(quantizer=QuantizerConfig("opq", codes=16), unique="reassign"),
            decoding=DecodingConfig(order="random", steps=2),
        ),
        FitConfig(steps=3, minutes=1.5),
        seed=7,
        device="cpu",
    )
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("config", PRESETS)
def test_a_user_can_reach_at_most_sixty_settings(config: TrainConfig) -> None:
    paths = setting_paths(config)
    assert len(set(paths)) == len(paths) <= MOST_SETTINGS


def test_capabilities_of_each_model() -> None:
    generates = ["decode digits", "plan sessions", "sample", "add items"]
    vectors, sids = "give item vectors", "give semantic IDs"
    assert {name: capabilities(model_class(name)) for name in MODELS} == {
        "maskgr": [*generates, vectors, sids, "be updated", "be exported to ONNX"],
        "maskgr-paper": [*generates, vectors, sids],
        "tiger": ["decode digits", "add items", vectors, sids],
        "liger": ["decode digits", "add items", vectors, sids],
        "sasrec": ["add items", vectors, "be updated", "be exported to ONNX"],
        "bert4rec": [vectors],
        "dreamrec": [vectors],
        "cadirec": [vectors],
        "neighbours": ["add items"],
        "popularity": ["add items"],
    }


def test_require_names_the_models_that_can() -> None:
    model = Popularity.__new__(Popularity)
    assert require(model, AddsItems) is model
    for capability, able in (
        (Decodes, "cannot decode digits; maskgr, maskgr-paper, tiger, liger can"),
        (PlansSessions, "cannot plan sessions; maskgr, maskgr-paper can"),
        (Samples, "cannot sample; maskgr, maskgr-paper can"),
    ):
        assert capability in CAPABILITIES.values()
        with pytest.raises(RequestError, match=f"Popularity {able}: train one of these"):
            require(model, capability)


def test_raises_when_there_is_no_such_model() -> None:
    with pytest.raises(RequestError, match="there is no model 'bert'; the models are maskgr, "):
        model_class("bert")


def test_presets_belong_to_maskgr_or_to_the_only_model_that_has_them() -> None:
    assert train_config("tiny") is not None
    assert train_config("tiny").name == "maskgr"
    assert train_config("cpu").name == "maskgr"
    assert train_config("paper").name == "maskgr-paper"
    assert isinstance(train_config("tiny-paper").model, PaperConfig)
    assert isinstance(train_config("tiny", model="sasrec").model, SASRecConfig)
    assert isinstance(train_config(model="popularity").model, PopularityConfig)


def test_raises_when_there_is_no_such_preset() -> None:
    with pytest.raises(RequestError, match="there is no preset 'huge'; the presets are cpu, "):
        train_config("huge")
    with pytest.raises(
        RequestError, match="sasrec has no preset 'paper'; its presets are tiny, cpu, published"
    ):
        train_config("paper", model="sasrec")


def test_settings_go_on_top_of_a_preset() -> None:
    config = train_config("tiny", ["learning_rate=0.5", "model.items=id"], seed=3, device="cpu")
    tiny = train_config("tiny")
    assert config == replace(
        tiny,
        model=replace(tiny.model, items="id"),
        fit=replace(tiny.fit, learning_rate=0.5),
        seed=3,
        device="cpu",
    )


def test_large_catalogues_are_trained_with_sampled_negatives() -> None:
    small, large = 100_000, 100_001
    for name in ("maskgr", "sasrec", "bert4rec"):
        config = train_config(model=name, device="cpu")
        assert config.for_catalogue(small) == config
        found = config.for_catalogue(large)
        assert found.model.loss == "sampled"
        assert found.for_catalogue(large) == found
        assert replace(found, model=config.model) == config
    maskgr = train_config(device="cpu").for_catalogue(large).model
    assert (maskgr.repeat_bias, maskgr.decoding.steps, maskgr.neighbours) == (False, 1, 128)
    chosen = train_config(settings=["loss=sampled", "repeat_bias=false"], device="cpu")
    assert chosen.for_catalogue(large) == chosen
    others = [train_config(model="popularity"), train_config("published", model="sasrec")]
    assert [config.for_catalogue(large) for config in others] == others


def test_steps_replace_the_minutes_of_a_preset_unless_minutes_are_given() -> None:
    assert train_config("cpu").fit.minutes > 0
    by_steps = train_config("cpu", ["fit.steps=50"]).fit
    assert (by_steps.steps, by_steps.minutes) == (50, 0)
    assert train_config("cpu", ["fit.steps=50", "fit.minutes=2"]).fit.minutes == 2
    assert train_config("cpu", ["fit.steps=50"], minutes=3).fit.minutes == 3
    assert train_config("tiny", minutes=4).fit.minutes == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: replace(train_config("tiny"), history_limit=0),
            "history_limit is 0; give",
        ),
        (
            lambda: replace(train_config("tiny"), seed=-1),
            "seed is -1; give a whole number",
        ),
        (lambda: MaskGRConfig(neighbours=-1), "neighbours is -1; give a whole number"),
        (lambda: MaskGRConfig(denoiser_share=1.0), "denoiser_share is 1.0; give a number from "),
    ],
)
def test_raises_when_a_setting_is_impossible(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        wrong()
