"""Recommends with what `maskgr export --format onnx` wrote: NumPy and ONNX Runtime, nothing else.

    python onnx_recommend.py FOLDER --history B004756YJA,B004ZT0SSG --top 10

In one step the whole catalogue is ranked at once. In several steps semantic IDs are unmasked by a
beam search: a step reveals some digits of every beam, with their exact joint probability over the
items that agree with what is revealed already. Scores are log-probabilities.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

CELLS = 2**22  # pairs of a user and an item that are scored at once


class Model:
    def __init__(self, folder, threads=0):
        folder = checked(Path(folder))
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.ids = json.loads((folder / "item_ids.json").read_text(encoding="utf-8"))
        self.numbers = {str(item): number for number, item in enumerate(self.ids)}
        self.arrays = read_arrays(folder / "arrays.safetensors")
        self.sizes = self.config.get("codebook_sizes", [1])
        self.table = self.arrays.get("table")  # (items, width)
        if self.table is None:  # items are the sums of their digits' vectors
            rows = self.arrays["codes"] + np.cumsum([0, *self.sizes[:-1]])
            self.table = sum(self.arrays["digit_vectors"][column] for column in rows.T)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        files = {file.stem: str(file) for file in folder.glob("*.onnx")}
        self.graphs = {n: onnxruntime.InferenceSession(f, options) for n, f in files.items()}

    def recommend(self, histories, top=10, **asked):
        """For each history (item IDs, oldest first) pairs of item ID and score, best first.

        `asked`: exclude_seen, steps, order, beams; by default as the model itself decodes."""
        how = {**self.config, **{key: value for key, value in asked.items() if value is not None}}
        if not 1 <= how["steps"] <= len(self.sizes) or min(top, how.get("beams", 1)) < 1:
            sys.exit(f"give 1 to {len(self.sizes)} as --steps, 1 or more as --top and --beams")
        if how.get("order") == "random" or how.get("remask") or how.get("guidance"):
            sys.exit("only maskgr itself has random orders, remasking and guidance; use its own")
        if unknown := [item for row in histories for item in row if str(item) not in self.numbers]:
            sys.exit(f"item {unknown[0]!r} is not in the catalogue; leave it out")
        rows = [np.array([self.numbers[str(i)] for i in row], dtype=int) for row in histories]
        size, found = max(1, CELLS // len(self.ids)), []
        for start in range(0, len(rows), size):
            found += self.rank(rows[start : start + size], top, how)
        return [[(self.ids[item], float(score)) for item, score in row] for row in found]

    def rank(self, histories, top, how):
        recent = [history[-how["history_limit"] :] for history in histories]
        lengths = np.array([len(history) for history in recent])
        padded = np.zeros((len(recent), lengths.max()), dtype=int)
        for row, history in zip(padded, recent, strict=True):
            row[: len(history)] = history
        encoded = self.run("history", vectors=self.table[padded], lengths=lengths)
        scores, answers = encoded["queries"] @ self.table.T, []  # (users, items)
        for user, (history, row) in enumerate(zip(histories, scores, strict=True)):
            bias = self.bias(history, how)
            row += bias
            row -= row.max() + np.log(np.exp(row - row.max()).sum())
            if how["exclude_seen"]:
                row[history] = -np.inf
            found = {item: row[item] for item in best(row, top)}
            if how["steps"] > 1:  # the beams first, and behind them the items of one step
                memory = {name: part[user : user + 1] for name, part in encoded.items()}
                memory["lengths"] = lengths[user : user + 1]
                beams = self.search(row, bias, memory, how)
                found = beams | {item: found[item] for item in found if item not in beams}
            answers.append([*found.items()][:top])
        return answers

    def bias(self, history, how):
        """(items,) on the scores: of the items that the user had, and of their neighbours."""
        bias = np.zeros(len(self.ids), dtype=np.float32)
        if "follow" in how:
            strengths, offsets = np.zeros(len(bias)), self.arrays["neighbour_offsets"]
            for age, item in enumerate(history[::-1][: how["recent"]]):
                own = slice(offsets[item], offsets[item + 1])
                strengths[self.arrays["neighbours"][own]] += (
                    self.arrays["strengths"][own] * 0.5**age
                )
            bias[:] = how["follow"] * np.log1p(strengths / how["floor"])
        bias[history] = how["repeat"]
        return bias

    def search(self, row, bias, memory, how):
        """{item: score} of the beams after the last step, best first.

        A beam has a score, the levels that are revealed, and the items that agree with it. Those
        with the most probable items are kept, not those of the highest score so far."""
        codes, left, steps = self.arrays["codes"], len(self.sizes), how["steps"]
        items = np.flatnonzero(row > -np.inf)
        beams = [(log_sum(row[items]), np.zeros(left, dtype=bool), items)] if len(items) else []
        energies = [row[items]]
        for step in range(steps if beams else 0):
            count = -(-left // (steps - step))
            left -= count
            grown = []
            for (score, revealed, items), own in zip(beams, energies, strict=True):
                logs = own - log_sum(own)
                chosen = choose(codes[items], np.exp(logs), revealed, count, how["order"])
                group = numbered(codes[items][:, chosen].T if left else [items])
                values = np.log(np.bincount(group, np.exp(logs)))
                peaks = np.full(len(values), -np.inf)
                np.maximum.at(peaks, group, logs)
                for number in best(peaks, how["beams"]):
                    beam = (score + values[number], revealed | chosen, items[group == number])
                    grown.append((score + peaks[number], beam))
            grown = sorted(grown, key=lambda pair: -pair[0])[: how["beams"]]
            beams = sorted((beam for _, beam in grown), key=lambda beam: -beam[0])
            if left:
                shown = np.array([[revealed for _, revealed, _ in beams]])
                digits = np.array([[codes[items[0]] for _, _, items in beams]], dtype=np.int64)
                queries = self.run("denoiser", **memory, codes=digits, revealed=shown)["asked"][0]
                pairs = zip(queries, beams, strict=True)
                energies = [self.table[own] @ query + bias[own] for query, (_, _, own) in pairs]
        return {items[0]: score for score, _, items in beams}

    def run(self, name, **inputs):
        outputs = [output.name for output in self.graphs[name].get_outputs()]
        return dict(zip(outputs, self.graphs[name].run(None, inputs), strict=True))


def best(values, count):
    """The places of the highest values above -inf, the first among equals first."""
    least = np.partition(values, max(0, len(values) - count))[max(0, len(values) - count)]
    places = np.flatnonzero((values >= least) & (values > -np.inf))
    return places[np.argsort(-values[places], kind="stable")][:count]


def log_sum(logs):
    return logs.max() + np.log(np.exp(logs.astype(float) - logs.max()).sum())


def choose(codes, probs, revealed, count, order):
    """(levels,) the masked digits that a beam of items with such codes (items, levels) reveals."""
    masked = np.flatnonzero(~revealed)
    if order == "greedy":  # those whose most likely code is the furthest ahead of the second
        probs = probs.astype(np.float32)  # as maskgr has them: what is all but certain is equal
        sums = np.zeros((len(masked), codes.max() + 2), dtype=np.float32)
        for own, level in zip(sums, masked, strict=True):
            np.add.at(own, codes[:, level], probs)
        second, first = np.partition(sums / np.cumsum(probs)[-1], -2)[:, -2:].T
        masked = masked[np.argsort(second - first, kind="stable")]
    return np.isin(np.arange(len(revealed)), masked[:count])


def numbered(columns):
    """(rows,) numbers from 0, equal where all columns are."""
    numbers = 0
    for column in columns:
        keys = numbers * (column.max() + np.int64(1)) + column
        numbers = np.unique(keys, return_inverse=True)[1]
    return numbers


def checked(folder):
    """The folder, if every file is as it was exported."""
    try:
        content = (folder / "maskgr.json").read_bytes()
        if (folder / "maskgr.sha256").read_text().split()[0] != hashlib.sha256(content).hexdigest():
            sys.exit(f"{folder / 'maskgr.json'} has changed since it was written; export it again")
        manifest = json.loads(content)
        if manifest["kind"] != "onnx-export" or manifest["schema"] != 2:
            sys.exit(f"{folder} is no ONNX export that this program can read; export it again")
        for name, about in manifest["files"].items():
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
                    sys.exit(f"{folder / name} has changed since it was written; export it again")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        sys.exit(f"{folder} is no whole ONNX export ({error}); export it again")
    return folder


def read_arrays(file):
    """{name: array} of a safetensors file: the size of a JSON header, the header, the numbers."""
    size = int(np.fromfile(file, "<u8", 1)[0])
    header = json.loads(np.fromfile(file, "u1", size, offset=8).tobytes())
    types = {"F32": "<f4", "I32": "<i4"}
    numbers = np.memmap(file, mode="r", offset=8 + size)
    return {
        name: numbers[slice(*own["data_offsets"])].view(types[own["dtype"]]).reshape(own["shape"])
        for name, own in header.items()
        if name != "__metadata__"
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--history", default="", help="item IDs, oldest first, with commas")
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--steps", type=int, help="1 ranks the whole catalogue at once")
    parser.add_argument("--order", choices=("greedy", "left-to-right"))
    parser.add_argument("--beams", type=int)
    parser.add_argument("--exclude-seen", action=argparse.BooleanOptionalAction)
    options = vars(parser.parse_args())
    history = [word.strip() for word in options.pop("history").split(",") if word.strip()]
    for item, score in Model(options.pop("folder")).recommend([history], **options)[0]:
        print(f"{item}\t{score:.5f}")


if __name__ == "__main__":
    main()
