"""A run folder: `training/` with checkpoints and logs, `recommender/` when it is done."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maskgr.artefact import write_file
from maskgr.config import DataConfig, TrainConfig
from maskgr.data.dataset import Dataset
from maskgr.errors import ArtefactError, RequestError
from maskgr.items.semantic_ids import SemanticIds
from maskgr.recommender import RECOMMENDER, Recommender

TRAINING = "training"


def start_run(
    out: Path,
    dataset: Dataset,
    config: TrainConfig,
    *,
    data: str,
    data_config: DataConfig,
    sids: Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Recommender | None:
    """Trains in `out`; None in the processes of a distributed training that do not write."""
    writes = os.environ.get("RANK", "0") == "0"
    made = {"data": data, "data_config": asdict(data_config), "command": sys.argv[1:]}
    training = out / TRAINING
    about = {"config": _plain(asdict(config)), "fingerprint": dataset.fingerprint}
    if resume:
        _require_same(training, about)
    elif writes:
        require_fresh(out)
        with write_file(training / "run.json") as draft:
            draft.write_text(json.dumps({**about, **made}, indent=2) + "\n", encoding="utf-8")
    recommender = Recommender.train(
        dataset,
        config=config,
        sids=None if sids is None else SemanticIds.load(sids),
        run=training,
        resume=resume,
        progress=progress,
        made=made,
    )
    if not writes:
        return None
    recommender.save(out / RECOMMENDER)
    return recommender


def require_fresh(out: Path) -> None:
    """Nothing that took long to make is overwritten."""
    if (out / TRAINING / "checkpoints").is_dir():
        raise RequestError(
            f"{out} holds a training; --resume goes on with it, another --out begins a new one"
        )
    known = {TRAINING, RECOMMENDER}
    if out.exists() and (not out.is_dir() or any(p.name not in known for p in out.iterdir())):
        raise ArtefactError(f"{out} exists and is not a run folder; give another --out")


def _require_same(training: Path, about: dict[str, Any]) -> None:
    """Resuming something else would silently be neither the old run nor a new one."""
    file = training / "run.json"
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(
            f"{training.parent} has no training to resume; leave --resume out"
        ) from None
    except ValueError as error:
        raise ArtefactError(f"{file} is damaged ({error}); train again elsewhere") from error
    if before.get("fingerprint") != about["fingerprint"]:
        raise RequestError(f"{training.parent} was trained on other data; resume with the same")
    changed = [k for k, v in _flat(about["config"]).items() if _flat(before["config"]).get(k) != v]
    if changed:
        raise RequestError(
            f"{training.parent} was started with another {', '.join(changed)}; resume with the "
            "settings it was started with"
        )


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))
