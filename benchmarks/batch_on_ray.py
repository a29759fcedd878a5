"""`maskgr recommend --engine ray` beside the plain engine, on one machine.

    python benchmarks/batch_on_ray.py [RUN] [--files 16] [--users 5000] [--quick] [--json]

A folder of Parquet files of random histories (`--users` in each) for the trained RUN, or for a
small model of the generated shop. Every job is a command in a process of its own, and all have to
write the same bytes:

- the plain engine, and Ray with one actor for each CPU: seconds, and their ratio;
- Ray with a single small file: what starting it costs;
- Ray with an actor that is killed (kill -9) after the first file;
- Ray whose own program is killed after the first file: what is left of its processes after
  `WAIT` seconds, and the same command again, which goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

WAIT = 90  # seconds for the processes of a killed program to end
LIMIT = 3600  # seconds of a job


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "maskgr", *map(str, words)]


def call(*words: object) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"maskgr {words[0]} failed: {done.stderr}")
    return done.stdout


def write_files(run: Path, folder: Path, files: int, users: int) -> None:
    table = next(own for own in (run / "recommender", run) if (own / "items.parquet").exists())
    ids, rng = pl.read_parquet(table / "items.parquet")["item_id"], np.random.default_rng(0)
    folder.mkdir()
    for number in range(files):
        lengths = rng.integers(1, 20, size=users)
        items = ids.gather(rng.integers(len(ids), size=lengths.sum()))
        owners = pl.Series("user_id", np.repeat(np.arange(users), lengths) + number * users)
        frame = pl.DataFrame([owners, items.alias("history")])
        frame.group_by("user_id", maintain_order=True).all().write_parquet(
            folder / f"part-{number:03}.parquet"
        )


def contents(folder: Path) -> dict[str, bytes]:
    return {own.name: own.read_bytes() for own in sorted(folder.iterdir())}


def descendants(pid: int) -> dict[int, str]:
    """The processes that a process has started, and those that they have, with their commands."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    found: dict[int, str] = {}
    wanted = {pid}
    while wanted:
        own = {int(p): args for p, parent, args in rows if int(parent) in wanted}
        found |= own
        wanted = set(own)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def disturbed(
    words: list[object], out: Path, disturb: Callable[[subprocess.Popen[str]], Any]
) -> Any:
    """Starts a job, calls `disturb` when its first file is there, and waits for its end."""
    job = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + LIMIT
    try:
        while not list(out.glob("*.parquet")):
            if job.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the job ended early: {job.communicate()[1]}")
            time.sleep(0.01)
        found = disturb(job)
        said, errors = job.communicate(timeout=LIMIT)
    finally:
        job.kill()
    return job.returncode, said, errors, found


def kill_actor(job: subprocess.Popen[str]) -> int:
    actors = [
        pid for pid, args in descendants(job.pid).items() if args.startswith("ray::MapWorker")
    ]
    os.kill(actors[0], signal.SIGKILL)
    return len(actors)


def kill_job(job: subprocess.Popen[str]) -> list[int]:
    started = list(descendants(job.pid))
    job.kill()
    return started


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run = options.run
    if run is None:
        run = folder / "run"
        how = ("--preset", "tiny", "--set", "fit.steps=20", "--set", "validations=1")
        call("train", "synthetic", *how, "--processes", 1, "--out", run)
    source, single = folder / "in", folder / "single"
    write_files(run, source, options.files, options.users)
    write_files(run, single, 1, 1)

    def words(name: str, given: Path = source, engine: str = "ray") -> list[object]:
        job = ["recommend", run, "--input", given, "--output", folder / name]
        return [*job, "--engine", engine]

    def timed(*job: object) -> float:
        start = time.perf_counter()
        call(*job)
        return time.perf_counter() - start

    found: dict[str, Any] = {"files": options.files, "users": options.files * options.users}
    found["plain_seconds"] = timed(*words("plain", engine="plain"))
    found["ray_seconds"] = timed(*words("ray"))
    found["start_seconds"] = timed(*words("one", single)) - timed(*words("two", single, "plain"))
    found["ray_over_plain"] = found["ray_seconds"] / found["plain_seconds"]
    expected = contents(folder / "plain")
    found["equal"] = contents(folder / "ray") == expected

    code, _, errors, actors = disturbed(words("actor"), folder / "actor", kill_actor)
    found["killed_actor"] = {
        "actors": actors,
        "exit_code": code,
        "said": errors,
        "equal": contents(folder / "actor") == expected,
    }
    code, _, _, pids = disturbed(words("driver"), folder / "driver", kill_job)
    done, end = len(list((folder / "driver").glob("*.parquet"))), time.monotonic() + WAIT
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    found["killed_program"] = {
        "exit_code": code,
        "files_done": done,
        "processes": len(pids),
        "left": sum(map(is_alive, pids)),
    }
    said = call(*words("driver"))
    found["rerun"] = {
        "files_there": int((re.search(r"\((\d+) were there\)", said) or [0, 0])[1]),
        "equal": contents(folder / "driver") == expected,
    }
    return found


def table(found: dict[str, Any]) -> str:
    actor, program, rerun = (found[name] for name in ("killed_actor", "killed_program", "rerun"))
    return "\n".join(
        [
            f"{found['users']:,} users in {found['files']} files",
            f"plain {found['plain_seconds']:.1f} s, Ray {found['ray_seconds']:.1f} s, ratio "
            f"{found['ray_over_plain']:.2f}; Ray needs {found['start_seconds']:.1f} s to start",
            f"the same bytes: {found['equal']}",
            f"one of {actor['actors']} actors killed: exit code {actor['exit_code']}, the same "
            f"bytes: {actor['equal']}",
            f"program killed after {program['files_done']} files: {program['left']} of its "
            f"{program['processes']} processes left after at most {WAIT} s",
            f"the same command again: {rerun['files_there']} files were there, the same bytes: "
            f"{rerun['equal']}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="a trained run")
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--users", type=int, default=5000, help="in each file")
    parser.add_argument("--quick", action="store_true", help="few users: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.quick:
        options.files, options.users = 8, 1500
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print(json.dumps(found, indent=2) if options.json else table(found))
    good = [found["equal"], found["killed_actor"]["equal"], found["rerun"]["equal"]]
    if not all(good) or found["killed_program"]["left"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
