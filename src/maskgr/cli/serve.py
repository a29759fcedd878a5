"""`maskgr serve`: trained runs behind HTTP, with a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskgr.errors import MaskGRError, RequestError

if TYPE_CHECKING:
    from maskgr.serving.served import Served

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]RUN", help="Folders that train wrote; the first answers by default."
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve small models of the generated shop.")
    ] = False,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    key_file: Annotated[
        Path | None, typer.Option(help="A file of keys, one a line; without it no key is needed.")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="Keys for reloading; without it there is no reloading.")
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(help="Models may be reloaded from below this folder; default: RUN's parent."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request.")] = 10.0,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 512,
    batch: Annotated[
        int, typer.Option(min=1, help="Requests answered together at most; 1: each alone.")
    ] = 64,
) -> None:
    """Serve recommendations over HTTP, and a page that shows how they are generated."""
    if bool(runs) == demo:
        raise RequestError("give a run to serve, or --demo")
    try:
        from maskgr.serving.logs import log_to_stderr
        from maskgr.serving.server import listen
        from maskgr.serving.server import serve as run_server
        from maskgr.serving.service import Service, ServiceConfig
    except ImportError as error:
        raise MaskGRError(
            f"serving needs {error.name}; install it: pip install 'maskgr[serve]'"
        ) from error

    log_to_stderr()
    keys, admin_keys = _keys(key_file), _keys(admin_key_file)
    if host not in LOOPBACK and not keys:
        print(f"warning: whoever reaches {host} may ask; see --key-file", file=sys.stderr)
    socket = listen(host, port)
    models = _demo() if demo else [_model(run) for run in runs or ()]
    config = ServiceConfig(
        keys=keys,
        admin_keys=admin_keys,
        root=root or (models[0].path.parent if models[0].path else None),
        seconds=timeout,
        queue=queue,
        largest=batch,
    )
    print(f"http://{host}:{socket.getsockname()[1]}", file=sys.stderr)
    run_server(Service(models, config), socket)


def _demo() -> list[Served]:
    from maskgr.serving.demo import demo_models

    print("the models of the generated shop (the first time: a minute)", file=sys.stderr)
    return demo_models(progress=sys.stderr.isatty())


def _model(run: str) -> Served:
    """NAME=RUN or RUN, whose name is that of the folder."""
    from maskgr.serving.served import Served

    name, equals, path = run.partition("=")
    if not equals or not name or "/" in name:
        name, path = Path(run).absolute().name, run
    return Served.load(name, Path(path))


def _keys(file: Path | None) -> tuple[str, ...]:
    """The lines that are not empty and do not start with #."""
    if file is None:
        return ()
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise RequestError(f"{file} has no key; write one a line")
    return keys
