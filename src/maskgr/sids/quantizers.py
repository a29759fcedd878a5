"""Vectors to digits and back: one interface, six quantisers, saved as safetensors and JSON."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from maskgr.errors import ArtefactError
from maskgr.sids.config import FitOptions, QuantizerConfig
from maskgr.sids.vectors import Digits, Floats, prepared_parts

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
    """A fitted quantiser."""

    name: ClassVar[str]

    @property
    def normalise(self) -> bool:
        """Whether it quantises directions only: vectors are scaled to length 1 (see `prepare`)."""

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """The number of codes at each level."""

    @classmethod
    def fit(cls, vectors: npt.ArrayLike, config: QuantizerConfig, options: FitOptions) -> Self:
        """Learns the codebooks from (n, d) vectors."""

    def encode(self, vectors: npt.ArrayLike) -> Digits:
        """(n, d) vectors to (n, levels) digits."""

    def decode(self, digits: Digits, levels: int | None = None) -> Floats:
        """(n, d) reconstruction of the prepared vectors from the first `levels` digits, or all."""

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """All that `from_state` needs: tensors, and settings that JSON can hold."""

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        """The inverse of `state`."""


def _quantizer_class(name: str) -> type[Quantizer]:
    module, attribute = QUANTIZERS[name].split(":")
    return cast("type[Quantizer]", getattr(importlib.import_module(module), attribute))


def fit_quantizer(
    vectors: npt.ArrayLike,
    config: QuantizerConfig,
    *,
    normalise: bool = True,
    seed: int = 0,
    device: str = "auto",
    progress: bool = False,
) -> Quantizer:
    """The quantiser that `config` names, fitted to (n, d) vectors or their directions.

    The same seed and vectors give the same digits. Only the RQ-VAE is trained on the `device`.
    """
    options = FitOptions(normalise, seed, device, progress)
    return _quantizer_class(config.quantizer).fit(vectors, config, options)


def reconstruction_errors(
    quantizer: Quantizer, vectors: npt.ArrayLike, digits: Digits
) -> list[float]:
    """Mean squared distance between vectors and reconstructions, by the number of levels decoded.

    It is divided by the vectors' mean squared length (1 where they are normalised): 0 is perfect,
    and 1 is the error of decoding everything to zero.
    """
    scale, errors = 0.0, [0.0] * digits.shape[1]
    for part, rows in prepared_parts(vectors, normalise=quantizer.normalise):
        scale += _squares(rows)
        for level in range(len(errors)):
            errors[level] += _squares(rows - quantizer.decode(digits[part], level + 1))
    return [error / (scale or 1.0) for error in errors]


def _squares(rows: Floats) -> float:
    return float(np.square(rows).sum(dtype=np.float64))


def save_quantizer(folder: Path, quantizer: Quantizer) -> None:
    """Writes `quantizer.safetensors` and `quantizer.json` into a folder that exists."""
    from safetensors.numpy import save_file

    tensors, settings = quantizer.state()
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / TENSORS)
    content = {"quantizer": quantizer.name, "settings": settings}
    (folder / SETTINGS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_quantizer(folder: Path) -> Quantizer:
    """Loads the quantiser that `save_quantizer` wrote into `folder`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = folder / SETTINGS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind, settings = _quantizer_class(content["quantizer"]), dict(content["settings"])
        file = folder / TENSORS
        return kind.from_state(load_file(file), settings)
    except FileNotFoundError:
        raise ArtefactError(f"{file} is missing; make the folder again") from None
    except (
        OSError,
        SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,  # torch raises it for tensors that do not fit the network
    ) as error:
        raise ArtefactError(f"{file} is damaged ({error}); make the folder again") from error
