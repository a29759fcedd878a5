"""The command `maskgr`: thin, one function a verb. Nothing heavy is imported before it is used."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
import typer.core

import maskgr
from maskgr.cli.console import (
    described,
    print_json,
    print_table,
    show_evaluation,
    show_explanation,
    show_inspection,
    show_notes,
    show_portrait,
    show_recommendations,
    show_report,
)
from maskgr.data.config import DataConfig, SyntheticConfig
from maskgr.decoding.config import DecodingConfig
from maskgr.errors import ArtefactError, DataError, MaskGRError, RequestError
from maskgr.settings import parse_settings, split_settings, train_config
from maskgr.sids.config import EncoderConfig, QuantizerConfig

if TYPE_CHECKING:
    from maskgr.data.dataset import Dataset
    from maskgr.recommender import Recommender

app = typer.Typer(
    help="A recommender that generates: masked diffusion over semantic IDs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Fetch a built-in dataset, look at your own.", no_args_is_help=True)
app.add_typer(data_app, name="data")


class _DefaultMake(typer.core.TyperGroup):
    """`maskgr sids DATA` means `maskgr sids make DATA`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["make", *args]
        return super().parse_args(ctx, args)


sids_app = typer.Typer(
    help="Semantic IDs: `maskgr sids DATA --out SIDS` makes them, `show` explains one.",
    cls=_DefaultMake,
    no_args_is_help=True,
)
app.add_typer(sids_app, name="sids")

DataArgument = Annotated[
    str, typer.Argument(metavar="DATA", help="A dataset folder, or a source: synthetic, beauty, …")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A folder that train wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
KCore = Annotated[
    int, typer.Option(help="Drop users and items with fewer events, to a fixed point.")
]
UnknownItems = Annotated[
    str,
    typer.Option(help="Items of the log that the catalogue lacks: error, drop, or keep (no text)."),
]
UnusedItems = Annotated[
    str, typer.Option(help="Items of the catalogue that are in no event: keep, drop or error.")
]
Repeats = Annotated[str, typer.Option(help="A user's repeated events with an item: keep or drop.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the source.")
]


History = Annotated[
    str, typer.Option(help="The user's item IDs, oldest first, separated by commas.")
]
UnknownIds = Annotated[str, typer.Option("--unknown", help="Unknown IDs: raise or skip.")]
RetrievalOption = Annotated[
    str | None,
    typer.Option("--retrieval", help="Rank by generative, dense, unified or fused retrieval."),
]
Order = Annotated[
    str | None, typer.Option(help="Digits are unmasked greedy, left-to-right or random.")
]
Steps = Annotated[
    int | None, typer.Option(help="Evaluations of the network; 1 scores every item at once.")
]
Beams = Annotated[int | None, typer.Option(help="Partly unmasked items kept after each step.")]
CacheOption = Annotated[
    str | None,
    typer.Option("--cache", help="Encode a history for every beam (off) or once (frozen)."),
]
Unconstrained = Annotated[
    bool, typer.Option("--unconstrained", help="Search digits that no item has, too.")
]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        print(maskgr.__version__)
        raise typer.Exit()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the data and the run are kept.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Everything on the embedded data: make it, train, evaluate, recommend."""
    from maskgr.cli.demo import run_demo

    run_demo(out)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The source's name.")],
    out: Annotated[Path | None, typer.Option(help="Also save it as a dataset folder here.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Get a built-in dataset: synthetic (generated), beauty, sports, toys, ml-1m (downloaded)."""
    from maskgr.data.inspect import inspect_dataset
    from maskgr.data.open import SYNTHETIC, fetch

    if settings and name != SYNTHETIC:
        raise RequestError(f"{name} has no parameters to --set; only {SYNTHETIC} has")
    dataset = fetch(
        name, synthetic=SyntheticConfig(**parse_settings(SyntheticConfig, settings or []))
    )
    if out is not None:
        dataset.save(out)
    show_inspection(inspect_dataset(dataset).to_dict(), as_json)


@data_app.command("inspect")
def data_inspect(
    data: DataArgument,
    k_core: KCore = DataConfig.k_core,
    unknown_items: UnknownItems = DataConfig.unknown_items,
    unused_items: UnusedItems = DataConfig.unused_items,
    repeats: Repeats = DataConfig.repeats,
    as_json: Json = False,
) -> None:
    """Counts, lengths, times, text, and every problem with what to do about it.

    The exit code is 0 if the data can be used as they are, and 1 if not.
    """
    from maskgr.data.open import inspect_data

    config = _data_config(k_core, unknown_items, unused_items, repeats)
    report = inspect_data(data, config)
    show_inspection(report.to_dict(), as_json)
    if not report.usable:
        raise typer.Exit(1)


@sids_app.command("make")
def sids_make(
    data: DataArgument,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    encoder: Annotated[
        str,
        typer.Option(
            help="wordllama, sentence-transformers:MODEL, huggingface:MODEL, embeddings (the "
            "dataset's own), or auto: embeddings where there are some, else wordllama."
        ),
    ] = EncoderConfig.encoder,
    template: Annotated[
        str | None, typer.Option(help="How columns become text, e.g. '{title}; by {brand}'.")
    ] = None,
    quantizer: Annotated[
        str, typer.Option(help="residual-kmeans, rqvae, pq, opq, random or item-id.")
    ] = QuantizerConfig.quantizer,
    levels: Annotated[int, typer.Option(help="Digits of an ID.")] = QuantizerConfig.levels,
    codes: Annotated[int, typer.Option(help="Codes a level.")] = QuantizerConfig.codes,
    unique: Annotated[
        str, typer.Option(help="Items with equal digits: append, reassign or share.")
    ] = "append",
    seed: Annotated[int, typer.Option(help="Same seed, same IDs.")] = QuantizerConfig.seed,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting of encoder or quantiser."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the report to this PNG.")] = None,
    k_core: KCore = DataConfig.k_core,
    unknown_items: UnknownItems = DataConfig.unknown_items,
    unused_items: UnusedItems = DataConfig.unused_items,
    repeats: Repeats = DataConfig.repeats,
    as_json: Json = False,
) -> None:
    """Text -> embeddings -> semantic IDs, with a report on their quality."""
    from maskgr.data.open import open_dataset
    from maskgr.sids.report import report
    from maskgr.sids.semantic_ids import SemanticIds

    encoder_set, quantizer_set = split_settings(settings or [], EncoderConfig, QuantizerConfig)
    dataset = open_dataset(data, _data_config(k_core, unknown_items, unused_items, repeats))
    show_notes(dataset)
    sids = SemanticIds.make(
        dataset,
        encoder=EncoderConfig(**{"encoder": encoder, "template": template, **encoder_set}),
        quantizer=QuantizerConfig(
            **{
                "quantizer": quantizer,
                "levels": levels,
                "codes": codes,
                "seed": seed,
                **quantizer_set,
            }
        ),
        unique=unique,  # type: ignore[arg-type]
        progress=sys.stderr.isatty(),
    )
    found = report(sids)
    sids.save(out, report=found.to_dict())
    if picture is not None:
        from maskgr.sids.plot import draw

        draw(sids, found, picture)
    if as_json:
        print_json(found.to_dict())
    else:
        show_report(found)
        print(f"saved to {out}")


@sids_app.command("show")
def sids_show(
    sids: Annotated[Path, typer.Argument(metavar="SIDS", help="A folder that sids wrote.")],
    item: Annotated[str, typer.Argument(metavar="ITEM", help="An item's ID.")],
    as_json: Json = False,
) -> None:
    """An item's digits, what each prefix has in common, and its neighbours."""
    from maskgr.sids.report import portrait
    from maskgr.sids.semantic_ids import SemanticIds

    found = portrait(SemanticIds.load(sids), item)
    if as_json:
        print_json(found.to_dict())
    else:
        show_portrait(found)


@app.command()
def train(
    data: DataArgument,
    out: Annotated[Path, typer.Option(help="The run folder.")],
    model: Annotated[str | None, typer.Option(help="What to train: maskgr or popularity.")] = None,
    preset: Annotated[str, typer.Option(help="Settings to start from: tiny, cpu, paper.")] = "cpu",
    minutes: Annotated[
        float | None, typer.Option(help="Wall-clock budget; the schedule is fitted to it.")
    ] = None,
    sids: Annotated[
        Path | None, typer.Option(help="Semantic IDs made by maskgr sids; else they are made.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(help="That train together; by default one a core in long CPU trainings."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting (see docs/training.md)."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes every random choice.")] = None,
    k_core: KCore = DataConfig.k_core,
    unknown_items: UnknownItems = DataConfig.unknown_items,
    unused_items: UnusedItems = DataConfig.unused_items,
    repeats: Repeats = DataConfig.repeats,
) -> None:
    """Train a model on a dataset and save it as a run folder.

    Under `torchrun --nproc-per-node N -m maskgr train …` it trains on N devices.
    """
    from maskgr.data.open import open_dataset
    from maskgr.models.base import model_class
    from maskgr.run import require_fresh, start_run
    from maskgr.training.distributed import check_processes, companions, processes_for

    config = train_config(preset, settings or [], model=model, minutes=minutes, seed=seed)
    kind = model_class(config.model)  # a wrong name is told before the data are read
    data_config = _data_config(k_core, unknown_items, unused_items, repeats)
    dataset = open_dataset(data, data_config)
    show_notes(dataset)
    if processes is None:
        minutes = config.loop.minutes if kind.shares_work else 0.0
        processes = processes_for(minutes, config.loop.device)
    check_processes(processes, config.loop.device)
    if not resume:
        require_fresh(out)  # before others wait for this process
    with companions(processes, [sys.executable, "-m", "maskgr", *sys.argv[1:]]):
        recommender = start_run(
            out,
            dataset,
            config,
            data=str(Path(data).absolute()) if Path(data).exists() else data,
            data_config=data_config,
            sids=sids,
            resume=resume,
            progress=sys.stderr.isatty(),
        )
    if recommender is not None:
        print(
            f"trained {config.model} on {len(dataset.users):,} users and {len(dataset.items):,} "
            f"items in {recommender.made['seconds']:.1f} s; saved to {out}"
        )


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None, typer.Option(help="The dataset; by default the one it was trained on.")
    ] = None,
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    protocol: Annotated[
        str, typer.Option(help="What the JSON's flat keys show: all or unseen.")
    ] = "all",
    k: Annotated[str, typer.Option(help="Cut-offs of the metrics.")] = "5,10",
    users: Annotated[
        int | None, typer.Option(help="Only so many users, chosen at random; all by default.")
    ] = None,
    retrieval: RetrievalOption = None,
    order: Order = None,
    steps: Steps = None,
    beams: Beams = None,
    cache: CacheOption = None,
    unconstrained: Unconstrained = False,
    as_json: Json = False,
) -> None:
    """Recall and NDCG over the whole catalogue, under both protocols.

    `all` ranks every item, `unseen` leaves out what the user had before.
    """
    from maskgr.data.open import shop_of
    from maskgr.data.splits import leave_out
    from maskgr.evaluation.protocol import PROTOCOLS
    from maskgr.evaluation.protocol import evaluate as measure
    from maskgr.recommender import Recommender

    chosen = next((name for name in PROTOCOLS if name == protocol), None)
    if chosen is None:
        raise RequestError(f"there is no protocol {protocol!r}; choose {' or '.join(PROTOCOLS)}")
    cutoffs = _cutoffs(k)
    recommender = Recommender.load(run)
    dataset = _data_of(recommender, run, data)
    holdout = leave_out(dataset.histories, recommender.config.leave_out).holdout(split)
    if users is not None:
        if users < 1:
            raise RequestError(f"--users {users} leaves nobody to ask; use 1 or more")
        holdout = holdout.sample(users)
    decoding = _decoding(recommender, order, steps, beams, cache, unconstrained, retrieval)
    result = measure(recommender, holdout, ks=cutoffs, shop=shop_of(dataset), decoding=decoding)
    if as_json:
        print_json({**result.to_dict(chosen), "split": split, "model": recommender.config.model})
    else:
        show_evaluation(recommender.config.model, split, result)


@app.command()
def recommend(
    run: RunArgument,
    history: History = "",
    top: Annotated[int, typer.Option(help="How many items.")] = 10,
    source: Annotated[
        Path | None,
        typer.Option("--input", help='JSONL of {"user_id": …, "history": […]}: a line a user.'),
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--output", help="JSONL to write; resumed if interrupted.")
    ] = None,
    allow: Annotated[str, typer.Option(help="Only these item IDs.")] = "",
    deny: Annotated[str, typer.Option(help="None of these item IDs.")] = "",
    exclude_seen: Annotated[
        bool | None,
        typer.Option(
            "--exclude-seen/--include-seen",
            help="Leave out the history's items; by default where users never repeat one.",
        ),
    ] = None,
    unknown: UnknownIds = "raise",
    retrieval: RetrievalOption = None,
    order: Order = None,
    steps: Steps = None,
    beams: Beams = None,
    cache: CacheOption = None,
    as_json: Json = False,
) -> None:
    """The next items for one history, or for a file of histories."""
    from maskgr.recommender import Recommender
    from maskgr.serving.batch import recommend_file

    skip = _unknown(unknown)
    if (source is None) != (target is None) or (source and (history or allow or deny or as_json)):
        raise RequestError(
            "--input and --output go together, and without --history, --json and lists"
        )
    recommender = Recommender.load(run)
    decoding = _decoding(recommender, order, steps, beams, cache, False, retrieval)
    if source and target:
        done = recommend_file(
            recommender,
            source,
            target,
            top,
            exclude_seen=exclude_seen,
            unknown=skip,
            decoding=decoding,
        )
        print(f"{done:,} users; saved to {target}")
        return
    found = recommender.recommend(
        _ids(history),
        top,
        exclude_seen=exclude_seen,
        allow=_ids(allow) if allow else None,
        deny=_ids(deny),
        unknown=skip,
        decoding=decoding,
    )
    rows = described(recommender, found)
    if as_json:
        print_json(rows)
    else:
        show_recommendations(rows)


@app.command()
def explain(
    run: RunArgument,
    history: History = "",
    top: Annotated[int, typer.Option(help="How many items.")] = 5,
    unknown: UnknownIds = "raise",
    order: Order = None,
    steps: Steps = None,
    beams: Beams = None,
    cache: CacheOption = None,
    as_json: Json = False,
) -> None:
    """The denoising of a recommendation, step by step."""
    from maskgr.explain import explain as trace
    from maskgr.recommender import Recommender

    recommender = Recommender.load(run)
    found = trace(
        recommender,
        _ids(history),
        top,
        decoding=_decoding(recommender, order, steps, beams, cache, False, "generative"),
        unknown=_unknown(unknown),
    )
    if as_json:
        print_json(found.to_dict())
    else:
        show_explanation(recommender, found)


@app.command("add-items")
def add_items(
    run: RunArgument,
    items: Annotated[Path, typer.Argument(help="New items: Parquet, CSV or JSONL.")],
    embeddings: Annotated[
        Path | None,
        typer.Option(
            help="Their vectors (.npy, or Parquet with item_id), where the catalogue's were given."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Another folder to save to; by default the run's own.")
    ] = None,
) -> None:
    """Make new items recommendable, by their text, without training."""
    from maskgr.artefact import is_artefact
    from maskgr.data.embeddings import align_embeddings
    from maskgr.data.problems import Problems
    from maskgr.data.tables import read_matrix, read_table
    from maskgr.recommender import RECOMMENDER, Recommender

    recommender, new, vectors = Recommender.load(run), read_table(items), None
    if embeddings is not None:
        if "item_id" not in new.columns:
            raise DataError(f"{items} has no column item_id (it has: {', '.join(new.columns)})")
        vectors = align_embeddings(read_matrix(embeddings), new["item_id"], Problems())
    more = recommender.add_items(new, embeddings=vectors)
    inside = run / RECOMMENDER
    more.save(out or (inside if is_artefact(inside) else run))
    added = len(more.items) - len(recommender.items)
    print(f"{added:,} new items, {len(more.items):,} in all; saved to {out or run}")


@app.command()
def experiment(
    name: Annotated[str, typer.Argument(help="dense, orders, cold-start or recipe.")],
    out: Annotated[Path, typer.Option(help="Its folder; what is trained there is used again.")],
    data: Annotated[str, typer.Option(help="A dataset folder or a built-in source.")] = "beauty",
    preset: Annotated[str, typer.Option(help="Settings to train with: tiny, cpu, paper.")] = "cpu",
    minutes: Annotated[float | None, typer.Option(help="Of each training.")] = None,
    users: Annotated[
        int | None, typer.Option(help="Only so many users, chosen at random; all by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes every random choice.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option(help="Of the recipe's variants, this one; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """A table of the paper, ours beside theirs; or a study of our own."""
    from maskgr.studies.registry import run_experiment
    from maskgr.studies.report import Asked

    if users is not None and users < 1:
        raise RequestError(f"--users {users} leaves nobody to ask; use 1 or more")
    if only and name != "recipe":
        raise RequestError(f"--only chooses among the variants of recipe, and {name} has none")
    found = run_experiment(name, Asked(data, out, preset, minutes, users, seed, tuple(only or ())))
    if as_json:
        print_json(found.to_dict())
        return
    print_table(found.columns, found.rows, title=found.title)
    for note in found.notes:
        print(note)


def _data_of(recommender: Recommender, run: Path, given: str | None) -> Dataset:
    """The dataset of a run, and only that: other histories would leak or mislead."""
    from maskgr.data.open import open_dataset

    made = recommender.made
    where = given or made.get("data")
    if where is None:
        raise RequestError(f"{run} does not say which data it was trained on; give --data")
    dataset = open_dataset(where, DataConfig(**made.get("data_config", {})))
    if dataset.fingerprint != made.get("fingerprint"):
        raise ArtefactError(
            f"{where} is not what {run} was trained on (it differs in users, items or events); "
            "give the same data with --data, or train again"
        )
    return dataset


def _data_config(k_core: int, unknown_items: str, unused_items: str, repeats: str) -> DataConfig:
    choices = {
        "unknown-items": (unknown_items, ("error", "drop", "keep")),
        "unused-items": (unused_items, ("keep", "drop", "error")),
        "repeats": (repeats, ("keep", "drop")),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise RequestError(f"--{name} {value} is not a choice; use {', '.join(allowed)}")
    return DataConfig(k_core, unknown_items, unused_items, repeats)  # type: ignore[arg-type]


def _decoding(
    recommender: Recommender,
    order: str | None,
    steps: int | None,
    beams: int | None,
    cache: str | None,
    unconstrained: bool,
    retrieval: str | None,
) -> DecodingConfig | None:
    """What the options change of the run's own way; None if nothing. None of them is ignored."""
    given = {
        "retrieval": retrieval,
        "order": order,
        "steps": steps,
        "beams": beams,
        "cache": cache,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if cache is not None and cache not in ("off", "frozen"):
        raise RequestError(f"--cache {cache} is not a choice; use off or frozen")
    ways = ("generative", "dense", "unified", "fused")
    if retrieval is not None and retrieval not in ways:
        raise RequestError(f"--retrieval {retrieval} is not a choice; use {', '.join(ways)}")
    if steps is not None and steps < 1:
        raise RequestError(f"--steps {steps} evaluates nothing; use 1 or more")
    if unconstrained:
        changes["constrained"] = False
    if not changes:
        return None
    decoding, model = recommender.decoding(**changes), recommender.generative()
    unmasking = [name for name in changes if name != "retrieval"]
    if unmasking and model.retrieval(decoding) == "dense":
        option = "unconstrained" if unmasking[0] == "constrained" else unmasking[0]
        raise RequestError(
            f"--{option} says how digits are unmasked, and dense retrieval, which this would be, "
            "unmasks none; add --retrieval generative"
        )
    return decoding


def _unknown(text: str) -> Literal["raise", "skip"]:
    if text not in ("raise", "skip"):
        raise RequestError(f"--unknown {text} is not a choice; use raise or skip")
    return "skip" if text == "skip" else "raise"


def _cutoffs(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--k {text} is not a list of numbers; write for example 5,10") from None


def _ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def main() -> NoReturn:
    """Runs the command; a user's error is one sentence and exit code 2."""
    # --debug is taken anywhere, since it is added to a command that has just failed.
    debug = "--debug" in sys.argv
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        code = typer.main.get_command(app)(arguments, prog_name="maskgr", standalone_mode=False)
        if code == 130:  # what newer releases of typer make of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        # Whose click a usage error comes from depends on typer's release; its method does not.
        usage = getattr(error, "format_message", None)
        if isinstance(error, (MaskGRError, OSError)) or usage:
            message = str(usage() if usage else error)
            called_bare = message.startswith("Usage: ")  # then the message is the help
            print(message if called_bare else f"error: {message}", file=sys.stderr)
            sys.exit(2)
        print(
            f"internal error: {type(error).__name__}: {error}; this is a bug in maskgr, please "
            "report it with the output of the same command with --debug",
            file=sys.stderr,
        )
        sys.exit(1)
