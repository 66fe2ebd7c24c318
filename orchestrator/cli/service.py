"""`outrider service`: make this machine's Outrider a systemd service."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import end_with_json

if TYPE_CHECKING:
    from orchestrator.daemon.systemd.files import ServiceChoices
    from orchestrator.daemon.systemd.install import Step

app = typer.Typer(help="Make Outrider a systemd service: unit, sockets, user, directories, first cluster.yaml.")

_Root = Annotated[Path, typer.Option("--root", help="The system to change: / or the directory of an image.")]
_Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
_Json = Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")]
_Gpu = Annotated[bool, typer.Option("--gpu", help="Open the devices of GPUs and NPUs to the service.")]
_Model = Annotated[str, typer.Option("--model", help="model.source of a first cluster.yaml; else SmolLM2 135M.")]
_Commands = Annotated[
    Path | None, typer.Option("--commands", help="Where the service has `outrider`, in an image; else this one's.")
]
_Join = Annotated[
    str, typer.Option("--join", metavar="FRONT[:PORT]", help="Be a host of that cluster, in place of a daemon here.")
]
_Token = Annotated[Path | None, typer.Option("--token-file", help="With --join: a file with the cluster's token.")]
_Systemd = Annotated[int | None, typer.Option("--systemd", help="The image's systemd version; else it is looked up.")]


@app.command()
def install(
    root: _Root = Path("/"),
    model: _Model = "",
    gpu: _Gpu = False,
    commands: _Commands = None,
    join: _Join = "",
    token_file: _Token = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start it, too.")] = True,
    systemd: _Systemd = None,
    yes: _Yes = False,
    as_json: _Json = False,
) -> None:
    """Write the files, make the user and directories, enable the units and start them. A cluster.yaml that is there
    stays as it is; a unit that differs is replaced after a question. With --join it is `outrider join` that runs."""
    from orchestrator.daemon.systemd.files import list_files
    from orchestrator.daemon.systemd.install import enable_units, install_files

    root = root.absolute()
    choices = _choose(root, model, gpu, commands, join, token_file)
    wanted = list_files(root, choices, systemd=systemd)
    standings = [(file, file.compare(root)) for file in wanted]
    _confirm(
        [f"{'replace' if how == 'differs' else 'write'} {file.path}" for file, how in standings if how in _CHANGES]
        + [f"make the user outrider, enable {' and '.join(choices.units)}" + (", start them" if start else "")],
        yes=yes,
    )
    _tell([*install_files(root, wanted), *enable_units(root, choices.units, start=start)], as_json=as_json)


@app.command()
def uninstall(
    root: _Root = Path("/"),
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove configuration, keys, state and prepared models, too.")
    ] = False,
    yes: _Yes = False,
    as_json: _Json = False,
) -> None:
    """Stop the service and remove its units. Its configuration, state and user stay, unless --purge."""
    from orchestrator.daemon.systemd.files import list_written
    from orchestrator.daemon.systemd.install import remove_service

    root = root.absolute()
    written = list_written(root)
    what = ["stop and disable its units", *(f"remove {path}" for path in written)]
    what += ["remove /etc/outrider, /var/lib/outrider and /var/cache/outrider with all that is in them"] * purge
    _confirm(what, yes=yes)
    _tell(remove_service(root, purge=purge), as_json=as_json)


@app.command()
def show(
    root: _Root = Path("/"),
    model: _Model = "",
    gpu: _Gpu = False,
    commands: _Commands = None,
    join: _Join = "",
    token_file: _Token = None,
    systemd: _Systemd = None,
    as_json: _Json = False,
) -> None:
    """Print each file that `install` would write, and how it compares with what is there. Changes nothing."""
    from orchestrator.daemon.systemd.files import TOKEN, list_files

    root = root.absolute()
    choices = _choose(root, model, gpu, commands, join, token_file)
    standings = [(file, file.compare(root)) for file in list_files(root, choices, systemd=systemd)]
    standings = [(replace(file, text="(the token)\n") if file.path == TOKEN else file, how) for file, how in standings]
    shown = [{"path": str(file.path), "standing": how, "text": file.text} for file, how in standings]
    end_with_json({"files": shown}, wanted=as_json)
    for file, how in standings:
        print(f"### {file.path} ({how})")
        print(file.text)


_CHANGES = ("new", "differs")


def _choose(
    root: Path, model: str, gpu: bool, commands: Path | None, front: str, token_file: Path | None
) -> ServiceChoices:
    from orchestrator.daemon.systemd.files import DEFAULT_MODEL, ServiceChoices, list_written

    token = _read_token(root, token_file) if front else ""
    had = any(path.name == "gpu.conf" for path in list_written(root))  # a later install takes nothing away
    place = commands or Path(sys.executable).absolute().parent
    return ServiceChoices(place, model or DEFAULT_MODEL, gpu or had, front, token)


def _read_token(root: Path, token_file: Path | None) -> str:
    """Return the token of the cluster that is to be joined; "" where an earlier install has it. Raises ServiceError."""
    from orchestrator.daemon.systemd.files import TOKEN, ServiceError, below

    if token_file is None and below(root, TOKEN).is_file():
        return ""
    if token_file is None:
        raise ServiceError("--join needs the cluster's token: --token-file FILE, with ~/.ray/auth_token of the front")
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServiceError(f"--token-file {token_file}: cannot be read: {error}") from error
    if not token:
        raise ServiceError(f"--token-file {token_file}: it is empty")
    return token


def _confirm(changes: list[str], *, yes: bool) -> None:
    """Ask whether this may be done. Raises ServiceError where nobody can be asked."""
    from orchestrator.daemon.systemd.files import ServiceError

    if yes:
        return
    if not sys.stdin.isatty():
        raise ServiceError(f"this would {'; '.join(changes)}. Say --yes to have it done")
    typer.echo("This will:\n" + "\n".join(f"  {change}" for change in changes), err=True)
    typer.confirm("Go on?", abort=True, err=True)


def _tell(done: list[Step], *, as_json: bool) -> None:
    end_with_json({"done": [step.to_status() for step in done]}, wanted=as_json)
    for step in done:
        print(f"{step.what}: {step.subject}")
