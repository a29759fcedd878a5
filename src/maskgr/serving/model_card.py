"""The model card of a recommender: what it is and learned from, how good it is, how to use it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskgr.errors import DataError
from maskgr.recommender import Recommender
from maskgr.settings import setting_paths
from maskgr.version import __version__

TAGS = ("recommendation", "sequential-recommendation")


@dataclass(frozen=True)
class Figures:
    """What `maskgr evaluate --json` printed."""

    split: str
    users: int
    metrics: Mapping[str, Mapping[str, float]]  # protocol -> metric -> mean
    how: str  # retrieval, order and steps

    @classmethod
    def read(cls, file: Path, model: str) -> Figures:
        """From a file; raises if it is that of another model, or something else."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            named = found["model"]
            how = ", ".join(
                f"{name} {found[name]}"
                for name in ("retrieval", "order", "steps")
                if found[name] is not None
            )
            metrics = {
                protocol: {name: float(value["mean"]) for name, value in values.items()}
                for protocol, values in found["protocols"].items()
            }
            figures = cls(str(found["split"]), int(found["users"]), metrics, how)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{file} cannot be read as figures ({error or type(error).__name__}); give what "
                "maskgr evaluate --json prints"
            ) from error
        if named != model:
            raise DataError(f"{file} is of a {named}, and this is a {model}; give its own figures")
        return figures


def model_card(recommender: Recommender, figures: Figures | None = None) -> str:
    """Markdown with the YAML header that the Hugging Face hub reads."""
    parts = (
        _header(recommender, figures),
        _about(recommender),
        _data(recommender),
        _results(figures),
        _limits(recommender),
        _settings(recommender),
    )
    return "\n".join(line for part in parts for line in (*part, ""))


def _header(recommender: Recommender, figures: Figures | None) -> Iterator[str]:
    """JSON values are YAML, whatever characters a name has."""
    name = recommender.config.name
    yield "---"
    yield "library_name: maskgr"
    yield f"tags: {json.dumps([*TAGS, name])}"
    if figures is not None:
        data = str(recommender.made.get("data", "own data"))
        results = [
            {
                "task": {"type": "recommendation", "name": "Sequential recommendation"},
                "dataset": {"type": data, "name": data, "split": figures.split},
                "metrics": [
                    {"type": metric, "value": value, "name": f"{metric} ({protocol} items)"}
                    for protocol, values in figures.metrics.items()
                    for metric, value in values.items()
                ],
            }
        ]
        yield f"model-index: {json.dumps([{'name': name, 'results': results}])}"
    yield "---"


def _about(recommender: Recommender) -> Iterator[str]:
    model = recommender.model
    yield f"# {recommender.config.name}: a recommender of {len(recommender.items):,} items"
    yield ""
    yield f"A model of the Python package maskgr: {model.about}."
    yield "It takes the items that a user had, oldest first, and ranks what may come next."
    yield ""
    yield "```python"
    yield "from huggingface_hub import snapshot_download"
    yield "from maskgr import Recommender"
    yield ""
    yield 'recommender = Recommender.load(snapshot_download("OWNER/NAME"))  # or this folder'
    history = recommender.items["item_id"].head(2).to_list()
    yield f"recommender.recommend({history!r}, top=10)"
    yield "```"
    yield ""
    yield "`load` checks every file but this card against its checksum in `maskgr.json`."


def _data(recommender: Recommender) -> Iterator[str]:
    made = recommender.made
    counts = made.get("counts", {"items": len(recommender.items)})
    yield "## Data"
    yield ""
    yield "| | |"
    yield "|---|---|"
    if "data" in made:
        yield f"| source | {made['data']} |"
    for name, count in counts.items():
        yield f"| {name} | {count:,} |"
    if "fingerprint" in made:
        yield f"| SHA-256 of IDs and histories | `{made['fingerprint']}` |"
    left = recommender.config.leave_out
    yield ""
    if left:
        yield f"Of every user {left} items were held out for the test, and {left} for validation."
    else:
        yield "Nothing was held out."
    if not recommender.repeats:
        yield "No user has an item twice."


def _results(figures: Figures | None) -> Iterator[str]:
    yield "## Results"
    yield ""
    if figures is None:
        yield "Not measured yet: `maskgr evaluate` measures recall and NDCG on the held-out items."
        return
    names = list(next(iter(figures.metrics.values())))
    yield f"| items ranked | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for protocol, values in figures.metrics.items():
        yield f"| {protocol} | {' | '.join(f'{100 * values[name]:.2f} %' for name in names)} |"
    yield ""
    yield f"On the {figures.split} items of {figures.users:,} users; {figures.how}."
    yield "`all` ranks every item, `unseen` leaves out those of the user's history."


def _limits(recommender: Recommender) -> Iterator[str]:
    limit = recommender.config.history_limit
    yield "## Limits"
    yield ""
    yield "- It knows the items of its catalogue alone. It learned what users did, not why: items"
    yield "  that were shown to them, or popular, are recommended more."
    yield f"- It sees the last {limit} items of a history, and nothing else of a user."
    yield "- Scores are log-probabilities of the next item, and are not calibrated."
    yield "- The catalogue with its texts is in this folder; users and their histories are not."


def _settings(recommender: Recommender) -> Iterator[str]:
    made, config = recommender.made, recommender.config
    yield "## Training"
    yield ""
    if "seconds" in made:
        yield f"{made['seconds'] / 60:,.1f} minutes, with maskgr {_version(made)}."
        yield ""
    yield "| setting | value |"
    yield "|---|---|"
    for path in setting_paths(config):
        value: Any = config
        for name in path:
            value = getattr(value, name)
        yield f"| `{'.'.join(path)}` | {value} |"


def _version(made: Mapping[str, Any]) -> str:
    return str(made.get("versions", {}).get("maskgr", __version__))
