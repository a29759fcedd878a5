"""The command `maskgr`: one file a noun. Tensors and data frames are imported inside the commands,
so that help is quick."""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Annotated, NoReturn

import typer

from maskgr.cli import (
    compare,
    data,
    demo,
    evaluate,
    export,
    info,
    items,
    models,
    recommend,
    serve,
    sids,
    study,
    train,
    update,
)
from maskgr.cli.console import Interrupted
from maskgr.errors import MaskGRError
from maskgr.version import __version__

app = typer.Typer(
    help="A recommender that generates: masked diffusion over semantic IDs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command()(demo.demo)
app.add_typer(data.app, name="data")
app.add_typer(sids.app, name="sids")
app.command()(models.models)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(compare.compare)
app.command()(recommend.recommend)
app.command()(recommend.explain)
app.command()(items.similar)
app.command()(items.embeddings)
app.command("add-items")(items.add_items)
app.command()(update.update)
app.command()(info.info)
app.command()(export.export)
app.command()(serve.serve)
app.add_typer(study.app, name="study")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


# torch, faiss and the interpreter each say it in their own words, and mostly as a RuntimeError.
NO_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "bad allocation", "start new thread")


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, MaskGRError):
        return False  # it may quote anything
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def _system_error(error: BaseException) -> BaseException | str:
    """What the system refused, as a sentence."""
    if _lacks_memory(error):
        return (
            "there is not enough memory; give it more, or choose a smaller model or batch; nothing "
            "that was saved before is lost"
        )
    if not isinstance(error, OSError) or error.strerror is None:
        return error
    where = "" if error.filename is None else f" {error.filename}"
    return f"cannot read or write{where}: {error.strerror}; nothing that was saved before is lost"


def _show_warning(message: Warning | str, *_: object) -> None:
    """One line, as notes on the data are, without the place in the code."""
    print(f"warning: {message}", file=sys.stderr)


def main() -> NoReturn:
    """Runs the command; a user's mistake is one sentence and exit code 2."""
    # --debug is taken anywhere, since it is added to a command that has just failed.
    debug = "--debug" in sys.argv
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            code = typer.main.get_command(app)(arguments, prog_name="maskgr", standalone_mode=False)
        if code == 130:  # newer releases of typer return this after Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort, Interrupted) as stop:
        print("; ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        sys.exit(130)
    except SystemExit:
        raise
    except BaseException as error:  # a panic of polars is no Exception
        if debug:
            traceback.print_exc()
        # The class of a usage error depends on typer's release; its method does not.
        usage = getattr(error, "format_message", None)
        if isinstance(error, (MaskGRError, OSError)) or usage or _lacks_memory(error):
            message = str(usage() if usage else _system_error(error))
            is_help = message.startswith("Usage: ")  # a group that was called without a command
            print(message if is_help else f"error: {message}", file=sys.stderr)
            sys.exit(2)
        print(
            f"internal error: {type(error).__name__}: {error}; this is a bug in maskgr, please "
            "report it with the output of the same command with --debug",
            file=sys.stderr,
        )
        sys.exit(1)
