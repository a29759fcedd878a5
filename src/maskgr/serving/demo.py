"""Models of the generated shop to try the service with: trained once, kept in the cache folder."""

from __future__ import annotations

from pathlib import Path

from maskgr.artefact import is_artefact
from maskgr.data.config import SyntheticConfig
from maskgr.data.download import cache_folder
from maskgr.data.open import from_shop
from maskgr.data.synthetic import generate
from maskgr.errors import ArtefactError
from maskgr.models.base import train_config
from maskgr.recommender import Recommender
from maskgr.serving.served import Served
from maskgr.version import __version__

MODELS = {"maskgr": "tiny", "neighbours": "cpu"}  # the presets


def demo_models(*, progress: bool) -> list[Served]:
    """A small MaskGR, and neighbours to compare it with."""
    return [_model(name, cache_folder() / f"demo-{__version__}", progress) for name in MODELS]


def _model(name: str, folder: Path, progress: bool) -> Served:
    path = folder / name
    if is_artefact(path):
        try:
            return Served.load(name, path)
        except ArtefactError:
            pass  # of another layout, or damaged: made again
    shop = from_shop(generate(SyntheticConfig()))
    config = train_config(MODELS[name], model=name)
    Recommender.train(shop, config=config, progress=progress).save(path)
    return Served.load(name, path)
