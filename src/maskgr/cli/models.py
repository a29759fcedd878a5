"""`maskgr models`."""

from __future__ import annotations

from maskgr.cli.console import print_json
from maskgr.cli.options import JsonOption


def models(as_json: JsonOption = False) -> None:
    """List the models: what each needs and can do, its presets."""
    from maskgr.models.base import MODELS, capabilities, model_class

    kinds = {name: model_class(name) for name in MODELS}
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "about": kind.about,
                    "needs": kind.needs,
                    "can": capabilities(kind),
                    "presets": list(kind.presets),
                }
                for name, kind in kinds.items()
            ]
        )
        return
    for name, kind in kinds.items():
        print(f"{name}: {kind.about}")
        print(f"    needs: {kind.needs}")
        print(f"    can: {', '.join(['rank items', *capabilities(kind)])}")
        print(f"    presets: {', '.join(kind.presets)}")
