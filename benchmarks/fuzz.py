"""Generated inputs for every reader: each is accepted, or refused by one sentence.

    python benchmarks/fuzz.py [--inputs 10000] [--only tables,where] [--seed 0] [--quick] [--json]

hypothesis makes tables, settings, requests and manifests; atheris (`pip install 'maskgr[fuzz]'`)
changes the bytes of files, led by the code that they reach. Exit code 1 where an input ended in
anything but a result or a MaskGRError of one sentence, took too long, or was refused only after
something had been written. tests/test_fuzz.py has a few hundred of these inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

from breaking.fuzzing import SECONDS, Tally, fuzz, try_input
from breaking.inputs import good_files
from breaking.readers import READERS, read_bytes

BYTES = 0.3  # of all inputs are made by atheris


def fuzz_bytes(name: str, inputs: int, number: int, folder: Path, seconds: float) -> Tally:
    """The file `name` with bytes that atheris chooses."""
    corpus, report = folder / "corpus", folder / "report.json"
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir()
    (corpus / "good").write_bytes(good_files()[name])
    report.unlink(missing_ok=True)
    words = ["--bytes", name, "--inputs", str(inputs), "--seed", str(number), "--folder", folder]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words), "--seconds", str(seconds)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    tally = Tally(f"bytes of {name}")
    if report.exists():
        tally = Tally(**json.loads(report.read_text()))
    if done.returncode or not report.exists():
        tally.failures[f"exit code {done.returncode}"] = done.stderr[-1000:]
    return tally


def run_atheris(name: str, inputs: int, number: int, folder: Path, seconds: float) -> None:
    import atheris

    tally = Tally(f"bytes of {name}")
    report = folder / "report.json"

    def one(content: bytes) -> None:
        try_input(read_bytes, (name, content), folder / "input", tally, seconds)
        if tally.inputs % 50 == 0 or tally.inputs >= inputs:
            report.write_text(json.dumps(asdict(tally)))

    for module in ("tables", "ingest", "timestamps", "embeddings", "events"):
        for own in vars(sys.modules[f"maskgr.data.{module}"]).values():
            if isinstance(own, FunctionType) and own.__module__.startswith("maskgr.data"):
                atheris.instrument_func(own)
    limits = [f"-runs={inputs}", f"-seed={number + 1}", "-max_len=4096", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", str(folder / "corpus")], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="over all readers")
    parser.add_argument("--only", help=f"some of {', '.join(READERS)}, atheris")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that an input may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few of each: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--bytes", help=argparse.SUPPRESS)  # in the process that atheris ends
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bytes:
        words = (options.bytes, options.inputs, options.seed, options.folder, options.seconds)
        run_atheris(*words)
        return
    if options.quick:
        options.inputs = 300
    os.environ["MASKGR_CACHE"] = "/nonexistent"  # nothing is cached, nobody's cache is read
    with tempfile.TemporaryDirectory(prefix="maskgr-fuzz-") as folder:
        tallies = fuzz_all(options, Path(folder))
    if options.json:
        print(json.dumps([asdict(tally) for tally in tallies], indent=2))
    else:
        show(tallies)
    failures = [(t.reader, what, value) for t in tallies for what, value in t.failures.items()]
    for reader, what, value in failures:
        print(f"FAILED: {reader}: {what}\n    {value}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def fuzz_all(options: argparse.Namespace, folder: Path) -> list[Tally]:
    asked = set(options.only.split(",")) if options.only else {*READERS, "atheris"}
    if unknown := asked - {*READERS, "atheris"}:
        sys.exit(f"{', '.join(unknown)}: choose from {', '.join((*READERS, 'atheris'))}")
    readers = [name for name in READERS if name in asked]
    files = list(good_files()) if "atheris" in asked else []
    if files and find_spec("atheris") is None:
        print("atheris is not installed (maskgr[fuzz]): its share is left out", file=sys.stderr)
        files = []
    share = (BYTES if readers else 1.0) if files else 0.0
    tallies = []
    for name in readers:
        count = max(1, round(options.inputs * (1 - share) / len(readers)))
        tallies.append(fuzz(name, count, options.seed, folder, options.seconds))
    for name in files:
        count = max(1, round(options.inputs * share / len(files)))
        tallies.append(fuzz_bytes(name, count, options.seed, folder, options.seconds))
    return tallies


def show(tallies: list[Tally]) -> None:
    rows = [(t.reader, t.inputs, t.accepted, t.refused, len(t.failures)) for t in tallies]
    total = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
    print(f"{'reader':32}{'inputs':>8}{'accepted':>10}{'refused':>9}{'failures':>10}")
    for name, *numbers in [*rows, ("all", *total)]:
        inputs, accepted, refused, failures = numbers
        print(f"{name:32}{inputs:8,}{accepted:10,}{refused:9,}{failures:10,}")


if __name__ == "__main__":
    main()
