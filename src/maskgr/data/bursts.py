"""Events of one user at the same time: duplicates of a log, and bursts that no person makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from maskgr.data.sequences import Sequences

BURST = 5  # events of a user in one second from which on they count as a burst

Times = npt.NDArray[np.datetime64]


@dataclass(frozen=True)
class Bursts:
    """Runs of `BURST` events or more of one user in the same second."""

    starts: npt.NDArray[np.int64]  # (bursts,) the first event of each
    lengths: npt.NDArray[np.int64]  # (bursts,) events


def duplicates(histories: Sequences, times: Times) -> npt.NDArray[np.bool_]:
    """(events,) whether an earlier event has the same user, item, time and weight."""
    run, lengths = _runs(histories, times)
    rows = np.flatnonzero(lengths[run] > 1)  # few, as a rule
    columns = {"run": run[rows], "item": histories.values[rows]}
    if histories.weights is not None:
        columns["weight"] = histories.weights[rows]
    first = pl.DataFrame(columns).select(pl.struct(pl.all()).is_first_distinct()).to_series()
    found = np.zeros(len(times), dtype=bool)
    found[rows[~first.to_numpy()]] = True
    return found


def bursts(histories: Sequences, times: Times) -> Bursts:
    """Where timestamps are dates, events of one day are no burst: none are found."""
    known = times[~np.isnat(times)]
    if (known == known.astype("datetime64[D]")).all():
        return Bursts(np.empty(0, np.int64), np.empty(0, np.int64))
    run, lengths = _runs(histories, times.astype("datetime64[s]"))
    starts = np.searchsorted(run, np.flatnonzero(lengths >= BURST))
    return Bursts(starts, lengths[lengths >= BURST])


def _runs(
    histories: Sequences, times: Times
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(events,) the run of neighbours of one user and time that each belongs to, and (runs,) their
    lengths; an event without a time is alone."""
    new = np.ones(len(times), dtype=bool)
    new[1:] = (times[1:] != times[:-1]) | (histories.places[1:] == 0)  # NaT differs from itself
    run = np.cumsum(new) - 1
    return run, np.bincount(run)
