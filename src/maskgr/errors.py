"""Errors that a user can act on: one sentence that names the thing and says what to do."""


class MaskGRError(Exception):
    """The root: anything below it is the caller's to mend, never a bug in the library."""


class DataError(MaskGRError):
    """Events, items or embeddings that cannot be used as they are."""


class SourceError(MaskGRError):
    """A built-in dataset that cannot be had: no network, a damaged file, an unknown name."""


class ArtefactError(MaskGRError):
    """A saved folder that is missing, damaged, or not what was asked for."""


class RequestError(MaskGRError):
    """A call that cannot be answered: an unknown item, an impossible argument."""
