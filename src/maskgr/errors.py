"""Errors that a user can fix: one sentence that says what is wrong and what to do."""

LONGEST = 2000  # characters; a sentence may quote anything


class MaskGRError(Exception):
    """Base class: a mistake that the caller can fix, never a bug in the library."""

    def __init__(self, message: str) -> None:
        line, half = " ".join(message.splitlines()), LONGEST // 2 - 1
        super().__init__(line if len(line) <= LONGEST else f"{line[:half]}…{line[-half:]}")


class DataError(MaskGRError):
    """Interactions, items or embeddings that cannot be used as they are."""


class SourceError(MaskGRError):
    """A built-in dataset that is not available: no network, a damaged file, an unknown name."""


class ArtefactError(MaskGRError):
    """A saved folder that is missing, damaged, or of another kind than was asked for."""


class RequestError(MaskGRError):
    """An invalid request: an unknown item, an impossible argument."""
