"""Recommendations for a folder of files of histories: a Parquet file for each of them, named after
it. A rerun skips the files that are done and goes on with the others; it knows by the keys in them
(see `batch`) that they are results of the same model, settings and input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from maskgr.errors import DataError, RequestError
from maskgr.recommender import Recommender
from maskgr.serving.batch import KEY, answer, count_rows, file_key, model_key, recommend_as

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")


class Shard(NamedTuple):
    """A file of histories, and the file that its recommendations go to."""

    source: Path
    target: Path
    key: str


class Done(NamedTuple):
    """What a folder of results holds."""

    users: int
    files: int
    before: int  # files that were there already


# Makes the results of files, and yields what is wrong with those that have none.
Engine = Callable[[Sequence[Shard], Mapping[str, Any]], Iterator[DataError]]


def recommend_folder(
    recommender: Recommender,
    source: Path,
    target: Path,
    top: int = 10,
    *,
    session: int | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Done:
    """Writes a file into `target` for every file of `source`. The other arguments are those of
    `recommend_file`. A file that cannot be read does not hold up the others: the error comes when
    they are done."""
    how = {"top": top, "session": session, **options}
    shards = _plan(model_key(recommender), source, target, how)
    answer(recommender, [[]], how)  # what is wrong for every file is said once, and now
    left = [shard for shard in shards if not shard.target.exists()]
    run = engine or (lambda left, how: one_by_one(recommender, left, how))
    bad = list(run(left, how)) if left else []
    if bad:
        more = f" (and {len(bad) - 1:,} more files have errors)" if len(bad) > 1 else ""
        raise DataError(
            f"{bad[0]}{more}; the other {len(shards) - len(bad):,} files are done, and the same "
            "command goes on"
        )
    users = sum(count_rows([shard.target]) for shard in shards)
    return Done(users, len(shards), len(shards) - len(left))


def one_by_one(
    recommender: Recommender, shards: Sequence[Shard], how: Mapping[str, Any]
) -> Iterator[DataError]:
    """The plain engine."""
    for shard in shards:
        try:
            recommend_as(recommender, *shard, how)
        except DataError as error:
            yield error


def _plan(model: str, source: Path, target: Path, how: Mapping[str, Any]) -> list[Shard]:
    """All files of the folder; raises where `target` holds anything but their results."""
    if target.exists() and not target.is_dir():
        raise RequestError(f"{target} is a file, and {source} is a folder; give a folder as output")
    if target.resolve().is_relative_to(source.resolve()):
        raise RequestError(f"{target} is in the input {source}; give another folder as output")
    shards = [Shard(own, target / name, file_key(model, own, how)) for own, name in _named(source)]
    keys = {shard.target.name: shard.key for shard in shards}
    unfinished = {f"{name}.{key}.parts" for name, key in keys.items()}
    for own in sorted(target.iterdir()) if target.exists() else ():
        if own.name in unfinished or own.name.startswith((".", "_")):
            continue
        if own.name not in keys or _key_of(own) != keys[own.name]:
            raise RequestError(
                f"{own} is no result of this model with these settings and this input; delete it, "
                "or give another folder as output"
            )
    return shards


def _named(source: Path) -> list[tuple[Path, str]]:
    """The files of the folder, in order, and the names of their results; .name and _name, such as
    _SUCCESS, are not data."""
    found: dict[str, Path] = {}
    for own in sorted(source.iterdir()):
        if own.name.startswith((".", "_")):
            continue
        ending = next((e for e in ENDINGS if own.name.endswith(e)), None)
        if ending is None or not own.is_file():
            what = "a folder" if own.is_dir() else "no " + ", ".join(ENDINGS)
            raise DataError(f"{own} is {what}; give a folder of files of histories")
        name = own.name.removesuffix(ending) + ".parquet"
        if name in found:
            raise DataError(f"{found[name]} and {own} would both become {name}; rename one of them")
        found[name] = own
    if not found:
        raise DataError(f"{source} has no {', '.join(ENDINGS)} file; check the path")
    return [(own, name) for name, own in found.items()]


def _key_of(file: Path) -> str | None:
    try:
        return pl.read_parquet_metadata(file).get(KEY)
    except (OSError, pl.exceptions.PolarsError):
        return None
