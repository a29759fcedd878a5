"""A run folder: `training/` with checkpoints and logs, `recommender/` when it is done."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maskgr.artefact import is_artefact, is_draft, write_file
from maskgr.data.config import DataConfig
from maskgr.data.dataset import Dataset
from maskgr.errors import ArtefactError, RequestError
from maskgr.models.base import TrainConfig
from maskgr.recommender import RECOMMENDER, Recommender
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.training.distributed import restartable
from maskgr.training.workspace import require_fresh as require_fresh_training
from maskgr.update import Update
from maskgr.update import train as train_update

TRAINING, ABOUT = "training", "run.json"


def start_run(
    out: Path,
    dataset: Dataset,
    config: TrainConfig,
    *,
    data: str,
    data_config: DataConfig,
    sids: Path | None = None,
    like: Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Recommender | None:
    """Trains in `out`; None in the processes of a distributed training that do not write.

    like: the run that this one is trained like, on everything.
    """
    made = {"data": data, "data_config": asdict(data_config), "command": sys.argv[1:]}
    if like is not None:
        made["like"] = str(like.absolute())
    given = None if sids is None else SemanticIds.load(sids)
    _begin(out, dataset, config, made, given, resume=resume)
    recommender = Recommender.train(
        dataset,
        config=config,
        sids=given,
        run=out / TRAINING,
        resume=resume,
        progress=progress,
        made=made,
        like=None if like is None else Recommender.load(like),
    )
    return _end(out, recommender)


def start_update(
    out: Path,
    update: Update,
    config: TrainConfig,
    *,
    of: Path,
    resume: bool = False,
    progress: bool = False,
) -> Recommender | None:
    """Goes on with the training of another run in `out`, which keeps all events."""
    made = {"update_of": str(of.absolute()), "command": sys.argv[1:]}
    _begin(out, update.data, config, made, None, resume=resume)
    recommender = train_update(
        update, config, run=out / TRAINING, resume=resume, progress=progress, made=made
    )
    return _end(out, recommender)


def _begin(
    out: Path,
    dataset: Dataset,
    config: TrainConfig,
    made: Mapping[str, Any],
    sids: SemanticIds | None,
    *,
    resume: bool,
) -> None:
    """Notes what is trained, or checks that it is what was begun."""
    if resume:
        require_same(out, dataset, config, sids)
    elif _writes():
        require_fresh(out)
        with write_file(out / TRAINING / ABOUT) as draft:
            about = {**_about(dataset, config, sids), **made}
            about["sha256"] = _checksum(about)
            draft.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _end(out: Path, recommender: Recommender) -> Recommender | None:
    if not _writes():
        return None
    recommender.save(out / RECOMMENDER)
    return recommender


def _writes() -> bool:
    return os.environ.get("RANK", "0") == "0"


def how_to_go_on(out: Path) -> str:
    """What to do after a training in `out` was interrupted."""
    if (out / TRAINING / ABOUT).exists():
        return "go on with --resume"
    return "nothing was trained yet, so give the same command again"


def goes_on(out: Path) -> bool:
    """Whether a training in `out` was begun and `torchrun` has started its processes again."""
    return restartable() and (out / TRAINING / ABOUT).exists()


def require_fresh(out: Path) -> None:
    """Raises if `out` holds a run, or anything that is no run folder."""
    require_fresh_training(out / TRAINING)
    if is_artefact(out / RECOMMENDER):
        raise RequestError(f"{out} holds a trained run; give another --out, or delete it first")
    known = {TRAINING, RECOMMENDER}
    if out.exists() and (
        not out.is_dir() or any(p.name not in known and not is_draft(p) for p in out.iterdir())
    ):
        raise ArtefactError(f"{out} exists and is not a run folder; give another --out")


def require_same(
    out: Path, dataset: Dataset, config: TrainConfig, sids: SemanticIds | None = None
) -> None:
    """Raises if the run was started with other data, settings or semantic IDs."""
    before, about = _begun(out), _about(dataset, config, sids)
    if before.get("fingerprint") != about["fingerprint"]:
        raise RequestError(f"{out} was trained on other data; use the same, or another --out")
    if before.get("content", about["content"]) != about["content"]:
        raise RequestError(
            f"{out} was started with other columns or embeddings of the items; use the same, or "
            "another --out"
        )
    if before.get("sids") != about["sids"]:
        raise RequestError(
            f"{out} was started with other --sids; use those it was started with, or another --out"
        )
    settings = _flat(before.get("config", {}))
    changed = [k for k, v in _flat(about["config"]).items() if settings.get(k) != v]
    if changed:
        raise RequestError(
            f"{out} was started with another {', '.join(changed)}; use the settings it was "
            "started with, or another --out"
        )


def _begun(out: Path) -> dict[str, Any]:
    """What was noted when the training in `out` began."""
    file = out / TRAINING / ABOUT
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{out} has no training to resume; leave --resume out") from None
    except ValueError as error:
        raise ArtefactError(f"{file} is damaged ({error}); train again elsewhere") from error
    # A training that was begun before there was a checksum goes on.
    if not isinstance(before, dict) or before.pop("sha256", None) not in (None, _checksum(before)):
        raise ArtefactError(
            f"{file} has changed since it was written (its checksum differs); train again elsewhere"
        )
    return before


def _checksum(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _about(dataset: Dataset, config: TrainConfig, sids: SemanticIds | None) -> dict[str, Any]:
    """What makes a training this one, and no other."""
    return {
        "config": _plain(config.to_dict()),
        "fingerprint": dataset.fingerprint,
        "content": dataset.content,
        "sids": None if sids is None else hashlib.sha256(sids.digits.tobytes()).hexdigest(),
    }


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
