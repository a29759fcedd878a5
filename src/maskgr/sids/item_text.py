"""ItemText: the text embeddings of a catalogue, and how to embed new items alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.artefact import read_manifest, write_folder
from maskgr.data.dataset import Dataset
from maskgr.data.download import cache_folder
from maskgr.data.tables import read_matrix
from maskgr.errors import ArtefactError, DataError, RequestError
from maskgr.sids.config import EncoderConfig
from maskgr.sids.encoders import EncodeAll, NoTextError, embed_items, resolved
from maskgr.sids.vectors import Floats

KIND, SCHEMA = "item-text", 1


@dataclass(frozen=True, eq=False)
class ItemText:
    """Row `i` belongs to item `i` of the dataset."""

    embeddings: Floats  # (items, d)
    encoder: EncoderConfig

    @classmethod
    def make(
        cls,
        data: Dataset,
        encoder: EncoderConfig,
        *,
        device: str = "auto",
        cache: Path | None = None,
        progress: bool = False,
        encode_all: EncodeAll | None = None,
    ) -> ItemText:
        """Texts whose vectors are in the folder `cache` are not encoded again; see `encode_items`.

        Where no item has any text, all have the same embedding, a one.
        """
        encoder = resolved(encoder, given=data.embeddings is not None)
        if encoder.template is None and not encoder.text:
            encoder = replace(encoder, text=data.text)  # new items are read the same way
        try:
            vectors = embed_items(
                data.items,
                encoder,
                embeddings=data.embeddings,
                device=device,
                cache=cache or cache_folder() / "embeddings",
                progress=progress,
                encode_all=encode_all,
            )
        except NoTextError:
            vectors = np.ones((len(data.items), 1), dtype=np.float32)
        return cls(vectors, encoder)

    def with_items(
        self, items: pl.DataFrame, embeddings: npt.NDArray[Any] | None, device: str = "auto"
    ) -> ItemText:
        """With the embeddings of new items behind its own."""
        vectors = embed_items(items, self.encoder, embeddings=embeddings, device=device)
        if vectors.shape[1] != self.embeddings.shape[1]:
            raise DataError(
                f"the new vectors have {vectors.shape[1]} dimensions where the old ones have "
                f"{self.embeddings.shape[1]}; use the same encoder"
            )
        return replace(self, embeddings=np.concatenate([self.embeddings, vectors]))

    def save(self, path: Path) -> None:
        with write_folder(path, KIND, SCHEMA, {"encoder": asdict(self.encoder)}) as folder:
            np.save(folder / "embeddings.npy", self.embeddings)

    @classmethod
    def load(cls, path: Path) -> ItemText:
        config = read_manifest(path, KIND, SCHEMA).config
        try:
            encoder = EncoderConfig(**config["encoder"])
        except (KeyError, TypeError, RequestError) as error:
            raise ArtefactError(f"{path} is damaged ({error}); train again") from error
        return cls(read_matrix(path / "embeddings.npy").values, encoder)
