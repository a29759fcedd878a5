"""The command's output: JSON for programs, tables for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from maskgr.cards import shown

if TYPE_CHECKING:
    import polars as pl

    from maskgr.data.dataset import Dataset
    from maskgr.evaluation.protocol import Evaluation
    from maskgr.explain import Explanation
    from maskgr.recommender import Recommendation, Recommender, Session
    from maskgr.sids.report import Portrait, Report


FILE_WIDTH = 200


class Interrupted(BaseException):
    """Ctrl-C in a command that can go on later; the message says how."""


@contextmanager
def interruptible(advice: str | Callable[[], str]) -> Iterator[None]:
    """Adds to a Ctrl-C how to go on after it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(advice if isinstance(advice, str) else advice()) from None


def print_json(value: Any) -> None:
    """Types that JSON lacks (dates, decimals) become text; NaN and infinity become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(own) for key, own in value.items()}
    return [_finite(own) for own in value] if isinstance(value, list | tuple) else value


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None
) -> None:
    """Text columns are aligned left, columns of numbers right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[place], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    # A file or a pipe has no width to keep to, so nothing is folded there.
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Two columns: names and values."""
    print_table(("", ""), [(name, shown(value)) for name, value in facts.items()])


def show_notes(dataset: Dataset) -> None:
    for note in dataset.notes:
        print(f"{note.severity}: {note}", file=sys.stderr)


def show_inspection(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    lengths, span = report["lengths"], report["time_span"]
    facts = {name: report[name] for name in ("users", "items", "interactions")}
    if lengths:
        facts["items a user"] = ", ".join(f"{name} {value:g}" for name, value in lengths.items())
        facts["sparsity"] = f"{1 - report['density']:.3%} of user-item pairs never occur"
        facts["repeats"] = f"{report['repeats']:.2%} of events"
        facts["time span"] = f"{span['first']} to {span['last']}" if span else "no timestamps"
        if report["targets"] < report["interactions"]:
            facts["targets"] = f"{report['targets']:,} events; the others are context"
        others = {k: v for k, v in report["columns"].items() if k not in report["text"]}
        for label, columns in (("item text", report["text"]), ("other columns", others)):
            shares = [f"{name} {share:.1%}" for name, share in columns.items()]
            facts[label] = ", ".join(shares) or "none"
        vectors = report["embeddings"]
        facts["embeddings"] = (
            f"{vectors['rows']:,} x {vectors['dimensions']}, {vectors['type']}"
            if vectors
            else "none"
        )
    print_facts(facts)
    for problem in report["problems"]:
        print(f"{problem['severity']}: {problem['message']}; {problem['fix']}")
    if not report["problems"]:
        print("no problems found")


def described(recommender: Recommender, found: list[Recommendation]) -> list[dict[str, Any]]:
    """Recommendations as rows: item_id, score, and the item's text columns."""
    import polars as pl

    scores = [r.score if math.isfinite(r.score) else None for r in found]
    column = pl.Series("score", scores, dtype=pl.Float64)
    return _with_text(recommender, [r.item_id for r in found], column)


def _with_text(
    recommender: Recommender, ids: list[Any], *columns: pl.Series
) -> list[dict[str, Any]]:
    """Rows of item_id, the `columns` beside it, and the items' text columns."""
    import polars as pl

    known = pl.Series("item_id", ids, dtype=recommender.items["item_id"].dtype)
    rows = pl.DataFrame([known, *columns])
    return rows.join(recommender.items, on="item_id", how="left", maintain_order="left").to_dicts()


def show_recommendations(rows: list[dict[str, Any]]) -> None:
    columns = ["item_id", "score", *_label(rows)]
    print_table(columns, [[row[column] for column in columns] for row in rows])


def _label(rows: list[dict[str, Any]]) -> list[str]:
    """The first text column, which is nearly always the title; none where there is none."""
    return [name for name in (rows[0] if rows else ()) if name not in ("item_id", "score")][:1]


def described_sessions(recommender: Recommender, found: list[Session]) -> list[dict[str, Any]]:
    """Sessions as rows: score, and the items with their text columns."""
    return [
        {
            "score": session.score if math.isfinite(session.score) else None,
            "items": _with_text(recommender, list(session.item_ids)),
        }
        for session in found
    ]


def show_sessions(rows: list[dict[str, Any]]) -> None:
    """A line an item; the session's number and score are beside its first item."""
    label = _label(rows[0]["items"]) if rows else []
    lines: list[list[Any]] = []
    for number, row in enumerate(rows, 1):
        for place, item in enumerate(row["items"]):
            head = ["", ""] if place else [f"{number}", row["score"]]
            lines.append([*head, *(item[column] for column in ("item_id", *label))])
    print_table(["session", "score", "item_id", *label], lines)


def show_explanation(recommender: Recommender, found: Explanation, most: int = 5) -> None:
    """The best beams after each step, then the recommendations."""
    if found.retrieval == "dense":
        print("Dense retrieval scores every item at once, so there are no steps to show.\n")
    for number, step in enumerate(found.steps, 1):
        rows = [
            (
                " ".join("·" if digit is None else str(digit) for digit in beam.digits),
                ", ".join(
                    f"digit {r.level + 1} = {r.code} ({r.probability:.1%})" for r in beam.revealed
                ),
                round(beam.score, 3),
                beam.remaining,
            )
            for beam in step[:most]
        ]
        print_table(["digits", "revealed", "score", "items left"], rows, title=f"step {number}")
        print()
    if found.retrieval == "unified":
        print("Unified retrieval ranks the items of the beams by their dense score:\n")
    show_recommendations(described(recommender, list(found.results)))
    if found.searched < len(found.results):
        print(f"\nThe items after the first {found.searched} are beyond the beams of these steps.")


def show_evaluations(
    split: str, results: Mapping[str, Evaluation], decoding: Mapping[str, Mapping[str, Any]]
) -> None:
    """A row for each model under each protocol, in percent with confidence intervals.

    `decoding`: model by model the settings that decided the result.
    """
    first = next(iter(results.values()))
    names = list(next(iter(first.metrics.values())))
    rows = []
    for protocol in first.metrics:
        best = None if first.oracle is None else first.oracle[protocol]
        for model, result in results.items():
            values = result.metrics[protocol]
            rows.append([model, protocol, *(str(values[name]) for name in names)])
            if best is not None:
                shares = (values[n].mean / best[n].mean if best[n].mean else 0.0 for n in names)
                rows.append(["  of oracle", protocol, *(f"{share:.0%}" for share in shares)])
        for floor, result in first.floors.items():
            values = result.metrics[protocol]
            rows.append([floor, protocol, *(str(values[name]) for name in names)])
        if best is not None:
            rows.append(["oracle", protocol, *(str(best[name]) for name in names)])
    print_table(["", "protocol", *names], rows, title=f"{split}: {first.users:,} users, in percent")
    for model, result in results.items():
        settings = ", ".join(f"{name} {shown(value)}" for name, value in decoding[model].items())
        print(f"{model}: {settings}; {result.users_per_second:,.0f} users per second")
        if result.invalid_share is not None:
            print(f"{model}: {result.invalid_share:.2%} of the beams ended as no item")


def show_report(report: Report) -> None:
    """The quality of semantic IDs: each level, collisions, agreement with the columns."""
    rows = [
        (
            "appended" if level.appended else str(place),
            level.codes,
            level.codes_used,
            round(level.perplexity, 1),
            "-" if level.appended else f"{level.reconstruction_error:.4f}",
        )
        for place, level in enumerate(report.levels, 1)
    ]
    columns = ["level", "codes", "used", "perplexity", "reconstruction error"]
    print_table(columns, rows, title=f"{report.items:,} items")
    rise = report.error_after / report.error_before - 1 if report.error_before else 0.0
    facts = {
        "unique before": f"{report.unique_share_before:.2%} of items, largest collision "
        f"{report.largest_collision}",
        "unique after": f"{report.unique_share_after:.2%} of items, error {rise:+.2%}",
    }
    for seen in report.agreement:
        within = ((seen.same_first_digit, "first digit"), (seen.same_first_two, "first two"))
        facts[f"same {seen.column}"] = f"{seen.chance:.2%} of all pairs" + "".join(
            f", {share:.1%} with the same {what}" for share, what in within if share is not None
        )
    print_facts(facts)


def show_portrait(portrait: Portrait) -> None:
    """One item's digits, prefixes and neighbours."""
    print_facts({**portrait.item, "digits": "-".join(map(str, portrait.digits))})
    prefixes = [
        (
            "-".join(map(str, prefix.digits)),
            prefix.items,
            ", ".join(f"{word} {share:.0%}" for word, share in prefix.words),
        )
        for prefix in portrait.prefixes
    ]
    print()
    print_table(["prefix", "items", "in common"], prefixes)
    print()
    if portrait.neighbours:
        names = list(portrait.neighbours[0])
        rows = [
            ["-".join(map(str, n["digits"])) if name == "digits" else n[name] for name in names]
            for n in portrait.neighbours
        ]
        print_table(names, rows, title="nearest by embedding")
