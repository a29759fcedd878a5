"""A large catalogue from end to end: every stage is the real command, in a process of its own.

    python benchmarks/scale.py [--items 1000000] [--users 1000000] [--minutes 10] [--asked 10000]
        [--folder FOLDER] [--quick] [--json]

A log and a catalogue are generated in chunks and written as Parquet; then `maskgr data inspect`,
`sids`, `train`, `evaluate` (on `--asked` users) and `recommend --input` (for as many) run on them,
and at last one request after the other is answered in Python. Of each stage: minutes, peak resident
memory of all of its processes together, and what it did in a second.

With --folder everything stays there, and a stage that is done is not done again: an interrupted
training goes on. A stage that takes longer than --limit minutes is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

START = 1_700_000_000
CHUNK = 100_000  # users, or items, generated and written at once
EVENTS = (5, 4.0)  # of a user: at least, and how many more on average
NEAR = 0.75  # share of events that are one to three items after the last one
SKEW = 3  # of the others: the higher, the more popular are the items of low numbers
SHELF = 40  # items whose titles differ in a number alone; 32 words of each kind tell shelves apart
LARGE = 100_000  # items up to which a training has to be told to sample
REQUESTS = 20
KIND = """
steel oak wool glass bamboo copper linen granite cork silk iron pine cotton marble rubber
paper leather brass clay foam felt birch nylon zinc jute ash carbon velvet slate maple
denim pewter
"""
THING = """
kettle tent lamp boots mixer bench razor camera rake drill scarf bowl clock easel stove
ladder mirror guitar saddle globe basket pillow anvil helmet compass violin hammock
lantern whisk trowel kayak puzzle
"""
PLACE = """
garden kitchen office mountain harbour studio nursery workshop balcony desert classroom
stable attic theatre bakery library clinic orchard cellar gallery airport camp forge
chapel beach stadium laboratory market barn museum hotel winery
"""


def write_shop(folder: Path, items: int, users: int, asked: int) -> None:
    """A log, a catalogue, and the histories of the first `asked` users as JSONL."""
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, users, CHUNK)):
        rows = _events(np.random.default_rng(number), first, min(first + CHUNK, users), items)
        rows.write_parquet(parts / f"events-{number:04}.parquet")
        if first == 0:
            lists = rows.group_by("user_id", maintain_order=True).agg(history="item_id")
            lists.head(asked).write_ndjson(folder / "asked.jsonl")
    for number, first in enumerate(range(0, items, CHUNK)):
        own = _items(np.arange(first, min(first + CHUNK, items)))
        own.write_parquet(parts / f"items-{number:04}.parquet")
    shop = folder / "shop"
    shop.mkdir(exist_ok=True)
    for name, stem in (("interactions", "events"), ("items", "items")):
        pl.scan_parquet(parts / f"{stem}-*.parquet").sink_parquet(shop / f"{name}.parquet")
    for part in parts.iterdir():
        part.unlink()
    parts.rmdir()


def _events(rng: np.random.Generator, first: int, last: int, items: int) -> pl.DataFrame:
    """Users who walk from an item to one close by, or jump to another, mostly a popular one."""
    lengths = EVENTS[0] + rng.poisson(EVENTS[1], size=last - first)
    user = np.repeat(np.arange(first, last), lengths)
    count = len(user)
    place = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    jumps = (place == 0) | (rng.random(count) > NEAR)
    walked = np.cumsum(rng.integers(1, 4, size=count))
    since = np.maximum.accumulate(np.where(jumps, np.arange(count), 0))  # the last jump
    target = (items * rng.random(count) ** SKEW).astype(np.int64)
    item = (target[since] + walked - walked[since]) % items
    day = START + 86_400 * place + (user * 7919) % 86_400
    return pl.DataFrame({"user_id": user, "item_id": item, "timestamp": day}).with_columns(
        pl.format("user-{}", pl.col("user_id")).alias("user_id"),
        pl.format("item-{}", pl.col("item_id")).alias("item_id"),
    )


def _items(numbers: np.ndarray) -> pl.DataFrame:
    """Titles of a few words, shared by the items of a shelf but for a number."""
    shelf = numbers // SHELF
    words = [
        pl.Series(text.split()).gather((shelf // step) % 32)
        for text, step in ((KIND, 1), (THING, 32), (PLACE, 1024))
    ]
    frame = pl.DataFrame({"n": numbers, "kind": words[0], "thing": words[1], "place": words[2]})
    return frame.select(
        pl.format("item-{}", "n").alias("item_id"),
        pl.format("{} {} for the {}, no. {}", "kind", "thing", "place", pl.col("n") % SHELF).alias(
            "title"
        ),
        (1 + (pl.col("n") * 7919) % 500).alias("price"),
    )


def answer_requests(folder: Path) -> dict[str, float]:
    """Milliseconds of one request at a time, and seconds until the first can be asked."""
    from maskgr.recommender import Recommender

    start = time.perf_counter()
    recommender = Recommender.load(folder / "run")
    loaded = time.perf_counter() - start
    rows = pl.read_ndjson(folder / "asked.jsonl", n_rows=REQUESTS + 1)["history"].to_list()

    def milliseconds(answer: Callable[[list[str]], object]) -> float:
        answer(rows[0])  # what is computed once, such as the table of item vectors
        seconds = []
        for row in rows[1:]:
            start = time.perf_counter()
            answer(row)
            seconds.append(time.perf_counter() - start)
        return 1000 * statistics.median(seconds)

    return {
        "load_seconds": loaded,
        "milliseconds": milliseconds(recommender.recommend),
        "similar_vectors_milliseconds": milliseconds(
            lambda row: recommender.similar_items(row[-1])
        ),
        "similar_sids_milliseconds": milliseconds(
            lambda row: recommender.similar_items(row[-1], by="sids")
        ),
    }


def commands(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The stages, each as the words of a command."""
    shop, sids, run = (str(folder / name) for name in ("shop", "sids", "run"))
    python = [sys.executable, "-m", "maskgr"]
    own = [sys.executable, __file__, "--folder", str(folder), "--asked", str(options.asked)]
    own += ["--items", str(options.items), "--users", str(options.users)]
    train = ["train", shop, "--sids", sids, "--out", run, "--minutes", str(options.minutes)]
    if options.items <= LARGE:  # as `maskgr train` does by itself for more
        for setting in ("loss=sampled", "repeat_bias=false", "items=text", "decoding.steps=1"):
            train += ["--set", setting]
    if (folder / "run" / "training" / "run.json").exists():
        train.append("--resume")
    asked, answers = str(folder / "asked.jsonl"), str(folder / "answers.parquet")
    return {
        "write": [*own, "--side", "write"],
        "ingest": [*python, "data", "inspect", shop, "--json"],
        "sids": [*python, "sids", shop, "--out", sids, "--json"],
        "train": [*python, *train],
        "evaluate": [*python, "evaluate", run, "--users", str(options.asked), "--json"],
        "recommend": [*python, "recommend", run, "--input", asked, "--output", answers],
        "requests": [*own, "--side", "requests"],
    }


def measured(command: list[str], folder: Path, limit: float) -> dict[str, Any]:
    """Runs a command to its end: seconds, peak memory of its processes, and what it printed."""
    start, peak = time.perf_counter(), 0.0
    environment = {**os.environ, "MASKGR_CACHE": str(folder / "cache")}
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, stdout=out, env=environment, start_new_session=True)
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, _resident(child.pid))
            if time.perf_counter() - start > 60 * limit:
                os.killpg(child.pid, signal.SIGKILL)
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = out.read().decode()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    peak = max(peak, usage.ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20))
    spent = usage.ru_utime + usage.ru_stime  # of all cores, whatever else the machine does
    found: dict[str, Any] = {"seconds": seconds, "cpu_seconds": spent, "peak_gib": peak}
    return found | (json.loads(printed) if printed.startswith("{") else {})


def _resident(pid: int) -> float:
    """GiB that a process and its children have in memory; 0 where the system does not tell."""
    total, waiting = 0, [pid]
    while waiting:
        folder = Path("/proc") / str(waiting.pop())
        try:
            total += int((folder / "statm").read_text().split()[1])
            for task in (folder / "task").iterdir():
                waiting += [int(word) for word in (task / "children").read_text().split()]
        except (OSError, IndexError):
            continue
    return total * resource.getpagesize() / 2**30


def figures(stage: str, found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the table says of a stage."""
    seconds = found["seconds"]
    row: dict[str, Any] = {"minutes": seconds / 60, "cpu_minutes": found["cpu_seconds"] / 60}
    row["peak_gib"] = found["peak_gib"]
    if stage == "sids":
        row |= {"items_per_second": options.items / seconds}
        row |= {"unique_share": found["unique_share_before"]}
    elif stage in ("write", "ingest"):
        row["users_per_second"] = options.users / seconds
    elif stage == "evaluate":
        row["users_per_second"] = found["users_per_second"]
        row |= {name: found["protocols"]["unseen"][name]["mean"] for name in ("recall@10",)}
        for name, floor in found["floors"].items():
            row[f"{name} recall@10"] = floor["protocols"]["unseen"]["recall@10"]["mean"]
    elif stage == "recommend":
        row["users_per_second"] = options.asked / seconds
    elif stage == "requests":
        names = [name for name in found if name.endswith(("_milliseconds", "load_seconds"))]
        row |= {name: found[name] for name in ("milliseconds", *names)}
    return row


def table(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    lines = [
        f"{options.items:,} items, {options.users:,} users, {options.minutes:g} min of training",
        f"{'stage':10}{'minutes':>9}{'of CPU':>9}{'peak GiB':>10}{'a second':>18}{'ms one':>10}",
    ]
    for stage, row in rows.items():
        rates = [f"{row[f'{what}_per_second']:,.0f} {what}" for what in ("users", "items")
                 if f"{what}_per_second" in row]  # fmt: skip
        one = f"{row['milliseconds']:,.0f}" if "milliseconds" in row else ""
        lines.append(
            f"{stage:10}{row['minutes']:9.1f}{row['cpu_minutes']:9.1f}{row['peak_gib']:10.2f}"
            f"{''.join(rates):>18}{one:>10}"
        )
    for stage, row in rows.items():
        known = ("minutes", "cpu_minutes", "peak_gib", "users_per_second", "items_per_second")
        known += ("milliseconds",)
        others = [f"{name} {value:,.4g}" for name, value in row.items() if name not in known]
        if others:
            lines.append(f"{stage}: {', '.join(others)}")
    return "\n".join(lines)


def run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """The stages that are not done yet, and the figures of all."""
    file = folder / "scale.json"
    asked = {name: getattr(options, name) for name in ("items", "users", "minutes", "asked")}
    done: dict[str, Any] = {"asked": asked}
    if file.exists():
        done = json.loads(file.read_text(encoding="utf-8"))
        if done["asked"] != asked:
            raise SystemExit(f"{folder} has a run of {done['asked']}; give another --folder")
    for stage in commands(options, folder):
        if stage not in done:
            print(f"{stage} …", file=sys.stderr)
            done[stage] = measured(commands(options, folder)[stage], folder, options.limit)
            file.write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
    return {stage: figures(stage, done[stage], options) for stage in commands(options, folder)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    parser.add_argument("--asked", type=int, default=10_000, help="users who are evaluated")
    parser.add_argument("--limit", type=float, default=45.0, help="minutes of a stage, at most")
    parser.add_argument("--folder", type=Path, help="keep everything here, and go on from there")
    parser.add_argument("--quick", action="store_true", help="2,000 items: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--side", choices=("write", "requests"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.items, options.users, options.minutes, options.asked = 2000, 1000, 0.05, 50
    return options


def main() -> None:
    options = parse()
    if options.side == "write":
        write_shop(options.folder, options.items, options.users, options.asked)
        print("{}")
        return
    if options.side == "requests":
        print(json.dumps(answer_requests(options.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        rows = run(options, folder.absolute())
    print(json.dumps(rows, indent=2) if options.json else table(rows, options))


if __name__ == "__main__":
    main()
