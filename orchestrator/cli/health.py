"""`outrider health`, `cordon` and `uncordon`: which parts of the fleet work, and keeping work away from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.daemon_socket import name_model, query_daemon, socket_of
from orchestrator.cli.options import AdminSocket, DaemonConfig, DaemonJson, DaemonPort, ModelName

Kind = Annotated[str, typer.Argument(metavar="KIND", help="`device`, `host` or `worker`.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="As `outrider status` names it: `here/CPU`, `target-0`.")]
_KINDS = ("device", "host", "worker")


def health(
    model: ModelName = None,
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    as_json: DaemonJson = False,
) -> None:
    """Show the devices, hosts, links and workers that something went wrong with, and those that are kept from work."""
    _show(query_daemon(socket or socket_of(config, port), name_model(model, "/admin/health")), as_json=as_json)


def cordon(
    kind: Kind,
    name: Name,
    drain: Annotated[bool, typer.Option("--drain", help="Let it finish its requests first.")] = False,
    model: ModelName = None,
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    as_json: DaemonJson = False,
) -> None:
    """Keep new requests away from a device, a host or a worker. With --drain its requests move to others that can go on
    with them, and it finishes the rest."""
    state = "draining" if drain else "cordoned"
    _hold({"kind": kind, "name": name, "state": state, "model": model}, socket or socket_of(config, port), as_json)


def uncordon(
    kind: Kind,
    name: Name,
    model: ModelName = None,
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    as_json: DaemonJson = False,
) -> None:
    """Let a device, a host or a worker take requests again."""
    _hold({"kind": kind, "name": name, "state": "", "model": model}, socket or socket_of(config, port), as_json)


def _hold(asked: dict[str, Any], path: Path, as_json: bool) -> None:
    if asked["kind"] not in _KINDS:
        raise typer.BadParameter(f"'{asked['kind']}' is none of {', '.join(_KINDS)}")
    _show(query_daemon(path, "/admin/hold", asked), as_json=as_json)


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    from rich.table import Table

    from orchestrator.plain_table import add_row, wide_console

    console = wide_console()
    if not answer["parts"]:
        console.print("all parts are healthy")
        return
    several = any("model" in one for one in answer["parts"])
    table = Table("part", "name", *(["model"] * several), "state", "nothing starts for", "last failure")
    for one in answer["parts"]:
        wait = f"{one['wait_s']:.0f} s" if one["wait_s"] else "-"
        whose = [one["model"]] if several else []
        add_row(table, one["kind"], one["name"], *whose, one["state"].replace("_", "-"), wait, one["why"])
    console.print(table)
    if any(one["state"] in ("draining", "cordoned") for one in answer["parts"]):
        console.print("`outrider uncordon KIND NAME` lets one work again", markup=False, highlight=False)
