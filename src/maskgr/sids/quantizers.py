"""Vectors to digits and back: one interface, six quantisers, saved as safetensors and JSON."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from maskgr.errors import ArtefactError, RequestError
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.vectors import Digits, Floats, chunks, normalise

# Classes by module, so that torch and faiss are imported only by those who use them.
QUANTIZERS = {
    "residual-kmeans": "maskgr.sids.residual_kmeans:ResidualKMeans",
    "rqvae": "maskgr.sids.rqvae:Rqvae",
    "pq": "maskgr.sids.product:ProductQuantizer",
    "opq": "maskgr.sids.product:OptimizedProductQuantizer",
    "random": "maskgr.sids.baseline_ids:RandomIds",
    "item-id": "maskgr.sids.baseline_ids:ItemIds",
}

TENSORS = "quantizer.safetensors"
SETTINGS = "quantizer.json"


class Quantizer(Protocol):
    """A fitted quantiser. It looks at the direction of a vector only (see `normalise`)."""

    name: ClassVar[str]

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """The number of codes at each level."""

    @classmethod
    def fit(cls, vectors: npt.ArrayLike, config: QuantizerConfig, *, progress: bool) -> Self:
        """Learns the codebooks from (n, d) vectors."""

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        """(n, d) vectors to (n, levels) digits."""

    def decode(self, digits: Digits, levels: int | None = None) -> Floats:
        """(n, d) normalised vectors as the first `levels` digits tell them (default: all)."""

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Tensors, and settings that JSON can hold: all that `from_state` needs."""

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        """The inverse of `state`."""


def quantizer_class(name: str) -> type[Quantizer]:
    if name not in QUANTIZERS:
        raise RequestError(f"there is no quantiser {name!r}; choose one of {', '.join(QUANTIZERS)}")
    module, attribute = QUANTIZERS[name].split(":")
    return cast("type[Quantizer]", getattr(importlib.import_module(module), attribute))


def fit_quantizer(
    vectors: npt.ArrayLike, config: QuantizerConfig, *, progress: bool = False
) -> Quantizer:
    """The quantiser that `config` names, fitted to (n, d) vectors."""
    for setting, least in (("levels", 1), ("codes", 2), ("restarts", 1), ("sample", 1)):
        if getattr(config, setting) < least:
            raise RequestError(
                f"{setting} is {getattr(config, setting)}; it must be {least} or more"
            )
    return quantizer_class(config.quantizer).fit(vectors, config, progress=progress)


def reconstruction_errors(
    quantizer: Quantizer, vectors: npt.ArrayLike, digits: Digits
) -> list[float]:
    """The mean squared distance to the normalised vectors, by the number of levels decoded.

    The vectors have length 1, so 0 is perfect and 1 is what decoding to zeros would give.
    """
    rows = normalise(vectors)
    errors = []
    for levels in range(1, digits.shape[1] + 1):
        total = 0.0
        for part in chunks(len(rows)):
            gap = rows[part] - quantizer.decode(digits[part], levels)
            total += float(np.square(gap).sum(dtype=np.float64))
        errors.append(total / len(rows))
    return errors


def save_quantizer(folder: Path, quantizer: Quantizer) -> None:
    """Writes `quantizer.safetensors` and `quantizer.json` into a folder that exists."""
    from safetensors.numpy import save_file

    tensors, settings = quantizer.state()
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / TENSORS)
    content = {"quantizer": quantizer.name, "settings": settings}
    (folder / SETTINGS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_quantizer(folder: Path) -> Quantizer:
    """What `save_quantizer` wrote into `folder`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = folder / SETTINGS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind, settings = quantizer_class(content["quantizer"]), dict(content["settings"])
        file = folder / TENSORS
        return kind.from_state(load_file(file), settings)
    except FileNotFoundError:
        raise ArtefactError(f"{file} is missing; make the folder again") from None
    except (
        OSError,
        SafetensorError,
        RequestError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,  # torch's word for tensors that do not fit the network
    ) as error:
        raise ArtefactError(f"{file} is damaged ({error}); make the folder again") from error
