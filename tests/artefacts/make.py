"""Makes the artefacts that later releases have to load: `python tests/artefacts/make.py`.

Run it once at each release, with the code of that release, and commit the folder that it writes
beside this file: a dataset, its semantic IDs and a trained recommender of a small generated shop,
and what the recommender recommends (see CONTRIBUTING.md).
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from maskgr import Dataset, Recommender
from maskgr.data.config import SyntheticConfig
from maskgr.data.open import fetch
from maskgr.models.base import train_config
from maskgr.sids.config import EncoderConfig, QuantizerConfig, SidsConfig
from maskgr.sids.semantic_ids import SemanticIds
from maskgr.version import __version__

HERE = Path(__file__).parent
SHOP = SyntheticConfig(users=40, items=24)
SETTINGS = (
    "fit.steps=150", "validations=2", "layers=1", "width=16", "heads=2", "hidden=32", "levels=3",
    "codes=4", "components=8", "neighbours=4", "device=cpu",
)  # fmt: skip
TOP, GAP = 5, 1e-3  # scores that are nearer than this could change places on another machine


def main() -> None:
    folder = HERE / __version__
    shop = fetch("synthetic", synthetic=SHOP)
    shop.save(folder / "shop")
    config = SidsConfig(
        EncoderConfig("wordllama"), QuantizerConfig(levels=2, codes=4, components=4)
    )
    sids = SemanticIds.make(shop, config, device="cpu")
    sids.save(folder / "sids")
    recommender = Recommender.train(shop, config=train_config("tiny", SETTINGS))
    recommender.save(folder / "recommender")
    expected = {
        "maskgr": __version__,
        "content": shop.content,
        "digits": sids.digits.tolist(),
        "recommended": list(recommended(recommender, shop)),
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1000:.0f} kB; delete the folders of releases that need not load")


def recommended(recommender: Recommender, shop: Dataset) -> list[dict[str, Any]]:
    """Histories with what is recommended after them, in one step and digit by digit."""
    found = []
    for user in range(0, len(shop.users), 5):
        history = shop.item_ids.gather(shop.histories[user][:-1]).to_list()
        for steps in (1, 3):
            decoding = recommender.decoding(steps=steps)
            best = recommender.recommend(history, TOP + 1, decoding=decoding)
            gaps = [a.score - b.score for a, b in pairwise(best)]
            if min(gaps) > GAP:
                rows = [[row.item_id, row.score] for row in best[:TOP]]
                found.append({"history": history, "steps": steps, "best": rows})
    assert len(found) >= 4
    return found


if __name__ == "__main__":
    main()
