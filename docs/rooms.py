"""Draws the rooms of the package and the imports between them: `make rooms`."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import grimp
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
IMAGE = ROOT / "docs" / "images" / "rooms.png"


def layers() -> list[list[str]]:
    """The rooms of each layer, top first, as the contract in pyproject.toml lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = contracts["tool"]["importlinter"]["contracts"][0]["layers"]
    return [[room.split(".")[-1].strip() for room in layer.split("|")] for layer in listed]


def imports() -> Counter[tuple[str, str]]:
    """How many modules of one room import how many of another."""
    graph = grimp.build_graph("maskgr")
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            rooms = [name.split(".")[1] if "." in name else "" for name in (module, other)]
            if all(rooms) and rooms[0] != rooms[1]:
                found[rooms[0], rooms[1]] += 1
    return found


def main() -> None:
    figure = Figure(figsize=(9, 10), layout="constrained")
    axes = figure.add_subplot()
    place = {}
    for row, layer in enumerate(layers()):
        for column, room in enumerate(layer):
            # Rooms alternate sideways, so that arrows past a layer stay visible.
            shift = 0.22 * (-1) ** row if len(layer) == 1 else column - (len(layer) - 1) / 2
            place[room] = (shift, -row)
    for (room, other), count in imports().items():
        if room in place and other in place and other not in ("errors", "version"):
            axes.annotate(
                "",
                place[other],
                place[room],
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": "0.6",
                    "lw": 0.4 + 0.15 * count,
                    "shrinkA": 16,
                    "shrinkB": 14,
                    "connectionstyle": "arc3,rad=0.12",
                },
            )
    for room, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "black"}
        axes.text(x, y, room, ha="center", va="center", fontsize=12, bbox=box, zorder=3)
    side = max(abs(x) for x, _ in place.values()) + 0.4
    axes.set(xlim=(-side, side), ylim=(-len(layers()) + 0.4, 0.6))
    axes.axis("off")
    axes.set_title("An arrow points from a room to one that it imports (errors: imported by all)")
    figure.savefig(IMAGE, dpi=90)
    print(f"wrote {IMAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
