"""A cache of text vectors on disk, so that only new or changed texts are encoded.

Each encoder has a folder, named after everything that determines its vectors. It holds parts that
are added and never changed: safetensors files with `keys` (n, 32), the SHA-256 of each text, and
`vectors` (n, d). A part's name is its own checksum, so damage is detected, and processes that
share the folder cannot overwrite each other's parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save

from maskgr.artefact import write_file
from maskgr.errors import ArtefactError
from maskgr.sids.vectors import Floats

PART_BYTES = 64 * 2**20
PART_SECONDS = 30.0


def text_key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class EncoderCache:
    """Reads parts, and writes one whenever enough vectors or seconds have accumulated.

    Used in a `with` block: vectors not written yet are written on leaving it, also on an error or
    Ctrl-C. Without a folder nothing is cached.
    """

    def __init__(self, root: Path | None, identity: Mapping[str, Any]) -> None:
        self._identity = json.dumps(identity, sort_keys=True)
        self.folder = None if root is None else root / _folder_name(identity, self._identity)
        self._keys: list[bytes] = []
        self._vectors: list[Floats] = []
        self._written_at = time.monotonic()

    def __enter__(self) -> Self:
        self._written_at = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write()

    def read(self, wanted: Mapping[bytes, int]) -> Iterator[tuple[list[int], Floats]]:
        """Yields, for each part, the row numbers of the wanted keys it holds and their vectors."""
        if self.folder is None:
            return
        for part in sorted(self.folder.glob("part-*.safetensors")):
            content = _read_part(part)
            if content is None:
                continue
            keys, vectors = content
            found = [(row, wanted[key]) for row, key in enumerate(keys) if key in wanted]
            if found:
                rows, numbers = zip(*found, strict=True)
                yield list(numbers), vectors[list(rows)]

    def add(self, keys: Sequence[bytes], vectors: Floats) -> None:
        if self.folder is None:
            return
        self._keys += keys
        self._vectors.append(vectors)
        full = sum(v.nbytes for v in self._vectors) >= PART_BYTES
        if full or time.monotonic() - self._written_at >= PART_SECONDS:
            self._write()

    def _write(self) -> None:
        if self.folder is None or not self._keys:
            return
        keys = np.frombuffer(b"".join(self._keys), dtype=np.uint8).reshape(-1, 32)  # (n, 32)
        vectors = np.concatenate(self._vectors)  # (n, d)
        content = save({"keys": keys, "vectors": vectors}, metadata={"encoder": self._identity})
        try:
            with write_file(self.folder / f"part-{_checksum(content)}.safetensors") as draft:
                draft.write_bytes(content)
        except ArtefactError as error:  # a cache that cannot be written is no reason to stop
            warnings.warn(f"vectors are not cached: {error}", stacklevel=2)
            self.folder = None
        self._keys, self._vectors = [], []
        self._written_at = time.monotonic()


def _folder_name(identity: Mapping[str, Any], canonical: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", str(identity["encoder"])).strip("-.")[-60:]
    return f"{readable}-{hashlib.sha256(canonical.encode()).hexdigest()[:12]}"


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _read_part(part: Path) -> tuple[list[bytes], Floats] | None:
    """Keys and vectors; a damaged part is deleted, so that the warning comes once."""
    content = part.read_bytes()
    if part.stem != f"part-{_checksum(content)}":
        warnings.warn(
            f"the cached vectors in {part} are damaged; they are computed again", stacklevel=2
        )
        with contextlib.suppress(OSError):
            part.unlink()
        return None
    tensors = load(content)
    keys = tensors["keys"].tobytes()
    return [keys[i : i + 32] for i in range(0, len(keys), 32)], tensors["vectors"]
