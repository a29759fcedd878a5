"""A trained model for other programs: ONNX graphs and arrays, or a folder for the Hugging Face hub.

An ONNX export is a folder of its own kind: `history.onnx` and, for models that generate,
`denoiser.onnx`; `arrays.safetensors` with item vectors, semantic IDs and neighbours;
`item_ids.json`; `config.json` with the numbers that go with them. `examples/onnx_recommend.py`
recommends with these files alone. A hub folder is a saved recommender with a model card, whose
weights are named as the hub expects.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from maskgr.artefact import CARD, is_artefact, write_folder
from maskgr.errors import ArtefactError, RequestError
from maskgr.models.base import Exports, require
from maskgr.models.graphs import Graph
from maskgr.nn.weights import HUB_WEIGHTS
from maskgr.recommender import Recommender
from maskgr.serving.model_card import Figures, model_card
from maskgr.users import Users
from maskgr.version import __version__

ONNX, ONNX_SCHEMA = "onnx-export", 2
CONFIG = "config.json"
WEIGHTS = ("network.safetensors", "neighbours.safetensors")  # the first of these is the model


def export_onnx(recommender: Recommender, out: Path) -> None:
    """Writes the folder `out`; an older ONNX export is replaced, anything else is not."""
    exported = require(recommender.model, Exports).exported()
    if any(find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise RequestError(
            "ONNX graphs are written by onnx and onnxscript; pip install 'maskgr[onnx]'"
        )
    ids = recommender.items["item_id"]
    config = {
        "model": recommender.config.name,
        "items": len(ids),
        "exclude_seen": not recommender.repeats,
        **exported.settings,
    }
    about = {"made": _public(recommender.made)}
    with write_folder(out, ONNX, ONNX_SCHEMA, about) as folder:
        for name, graph in exported.graphs.items():
            _write_graph(graph, folder / f"{name}.onnx")
        arrays = {name: np.ascontiguousarray(array) for name, array in exported.arrays.items()}
        save_file(arrays, folder / "arrays.safetensors")
        _write_json(ids.to_list(), folder / "item_ids.json")
        _write_json(config, folder / CONFIG)


def _write_graph(graph: Graph, file: Path) -> None:
    with _silent():
        program = torch.onnx.export(
            graph.network,
            kwargs=dict(graph.inputs),
            dynamo=True,
            dynamic_shapes={name: dict(axes) for name, axes in graph.axes.items()},
            output_names=list(graph.outputs),
            verbose=False,
        )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # where in this machine's source code a node comes from
        program.save(file, external_data=False)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the exporter's advice to its own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def export_hub(recommender: Recommender, out: Path, figures: Figures | None = None) -> None:
    """Writes the folder `out`, which `Recommender.load` reads; an older hub export is replaced,
    anything else is not."""
    if is_artefact(out) and not (out / CONFIG).is_file():
        raise ArtefactError(
            f"{out} was not made by maskgr export, so it is left alone; give another --out"
        )
    # Nobody's history is published.
    public = replace(recommender, made=_public(recommender.made), users=Users.none())
    config = {
        "model_type": recommender.config.name,
        "library_name": "maskgr",
        "maskgr_version": __version__,
        "items": len(recommender.items),
        "settings": recommender.config.to_dict(),
    }

    def add(folder: Path) -> None:
        if not (folder / HUB_WEIGHTS).exists():
            weights = next(folder / name for name in WEIGHTS if (folder / name).exists())
            weights.rename(folder / HUB_WEIGHTS)
        _write_json(config, folder / CONFIG)
        (folder / CARD).write_text(model_card(public, figures), encoding="utf-8")

    public.save(out, add=add)


def _public(made: Mapping[str, Any]) -> dict[str, Any]:
    """How a model was made, without the folders and the command of the machine that made it."""
    kept = {key: value for key, value in made.items() if key != "command"}
    if "data" in kept:
        kept["data"] = Path(kept["data"]).name
    if "source" in kept.get("provenance", {}):
        source = Path(kept["provenance"]["source"]).name
        kept["provenance"] = {**kept["provenance"], "source": source}
    return kept


def _write_json(content: Any, file: Path) -> None:
    text = json.dumps(content, indent=None if isinstance(content, list) else 2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
