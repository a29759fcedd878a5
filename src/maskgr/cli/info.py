"""`maskgr info`."""

from __future__ import annotations

from typing import Any

from maskgr.cli.console import print_facts, print_json
from maskgr.cli.options import JsonOption, RunArgument


def info(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show what a run is: model, data, settings, figures, versions and sizes."""
    from maskgr.artefact import is_artefact
    from maskgr.recommender import RECOMMENDER, Recommender
    from maskgr.settings import setting_paths

    recommender = Recommender.load(run)
    folder = run / RECOMMENDER if is_artefact(run / RECOMMENDER) else run
    config, made = recommender.config, dict(recommender.made)
    files = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    if as_json:
        about = {"config": config.to_dict(), "made": made, "files": files}
        print_json({"model": config.name, **recommender.summary(), **about})
        return
    facts: dict[str, Any] = {"model": f"{config.name}: {recommender.model.about}"}
    facts |= {name: value for name, value in recommender.summary().items() if value is not None}
    facts["data"] = made.get("data") or made.get("update_of") or "given in Python"
    for name in ("like", "update_of"):
        if name in made:
            facts[name.replace("_", " ")] = made[name]
    for stage, own in made.get("fits", {}).items():
        figures = ", ".join(f"{name} {value:.4f}" for name, value in own["metrics"].items())
        label = "training" if stage == "." else f"training, {stage}"
        facts[label] = f"{own['steps']:,} of {own['total']:,} steps; {figures or 'no validation'}"
    facts["size"] = f"{sum(files.values()) / 1e6:.1f} MB in {len(files)} files"
    print_facts(facts)
    print("\nsettings")
    print_facts({".".join(path): _value(config, path) for path in setting_paths(config)})


def _value(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config
