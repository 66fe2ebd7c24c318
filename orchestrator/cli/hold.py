"""`outrider cordon`, `uncordon` and `drain`: keep work away from a host, a device or a worker."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import Place, StatusError, name_model, query_daemon
from orchestrator.cli.options import KINDS, ModelName, Yes, complete_part, confirm, print_json
from orchestrator.plain_table import print_lines, print_table

_Name = Annotated[
    list[str],
    typer.Argument(
        metavar="[KIND] NAME",
        help="A host, a device (`here/CPU`) or a worker (`target`, or `target-0` of several).",
        autocompletion=complete_part,
    ),
]
_LOOK_S = 0.25  # until a drain is looked at again. Not tuned.
_DRAINED = "cordoned"
_HOLD = "/admin/hold"


@admin_command
def health(
    daemon: Daemon,
    ready: Annotated[
        bool, typer.Option("--ready", help="Say whether requests are taken, and exit 1 where they are not.")
    ] = False,
    model: ModelName = None,
) -> None:
    """Show the models that do not serve, and why; the devices, hosts, links and workers that something went wrong
    with, and those that are kept from work."""
    answer = daemon.ask(name_model(model, "/admin/health"))
    if not ready:
        show_health(answer)
    elif any(model["phase"] in ("ready", "unloaded") for model in answer["models"]):  # the latter loads at a request
        print_lines("ready")
    else:
        print_lines(f"not ready: the model is {answer['models'][0]['phase']}: {answer['models'][0]['detail']}")
        raise typer.Exit(1)


def show_health(answer: dict[str, Any]) -> None:
    for model in answer["models"]:
        name = f"the model '{model['model']}'" if model["model"] else "the model"
        if model["phase"] != "ready":
            print_lines(f"{name} is {model['phase']}: {model['detail']}")
        elif model["missing"]:
            print_lines(f"{name} is degraded: {'; '.join(model['missing'])}")
    if not answer["parts"]:
        if not any(model["missing"] for model in answer["models"]):
            print_lines("all parts are healthy")
        return
    several = any("model" in part for part in answer["parts"])
    rows = []
    for part in answer["parts"]:
        wait = f"{part['wait_s']:.0f} s" if part["wait_s"] else "-"
        whose = [part["model"]] if several else []
        rows.append((part["kind"], part["name"], *whose, part["state"].replace("_", "-"), wait, part["why"]))
    print_table(("part", "name", *(["model"] * several), "state", "nothing starts for", "last failure"), rows)
    if any(part["state"] in ("draining", "cordoned") for part in answer["parts"]):
        print_lines("`outrider uncordon NAME` lets one work again")


@admin_command
def cordon(
    daemon: Daemon,
    name: _Name,
    drain: Annotated[bool, typer.Option("--drain", help="Let it finish its requests first, and do not wait.")] = False,
    model: ModelName = None,
) -> None:
    """Keep new requests away from a host, a device or a worker. What it has it finishes."""
    show_health(daemon.ask(_HOLD, _build_hold(name, "draining" if drain else "cordoned", model)))


@admin_command
def uncordon(daemon: Daemon, name: _Name, model: ModelName = None) -> None:
    """Let a host, a device or a worker take requests again."""
    show_health(daemon.ask(_HOLD, _build_hold(name, "", model)))


@admin_command
def drain(
    daemon: Daemon,
    name: _Name,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait; 0: do not wait.")] = 300.0,
    yes: Yes = False,
    model: ModelName = None,
) -> None:
    """Empty a host, a device or a worker: its requests move to where they can go on to the bit, or end there. Waits
    until none is left; ends with 1 where some are left after the time, and it goes on draining then."""
    place = daemon.find_place()
    confirm(f"take all work from {' '.join(name)}", yes=yes)
    held = query_daemon(place, _HOLD, _build_hold(name, "draining", model))
    left = _wait_drained(place, held, model, timeout_s, quiet=daemon.as_json)
    if daemon.as_json:
        drained = not left and timeout_s > 0.0
        summary = {"kind": held["kind"], "name": held["name"], "drained": drained, "requests": left}
        print_json(summary)
    elif timeout_s and not left:
        print(f"{held['kind']} {held['name']} is drained; `outrider uncordon {held['name']}` lets it work again")
    if left and timeout_s:
        raise StatusError(
            f"{held['kind']} {held['name']} still has {len(left)} requests after {timeout_s:g} s: {', '.join(left[:5])}"
            f"{', ...' if len(left) > 5 else ''}; it goes on draining. `outrider cancel ID` ends one"
        )


def _build_hold(name: list[str], state: str, model: str | None) -> dict[str, Any]:
    if len(name) > 2 or (len(name) == 2 and name[0] not in KINDS):
        raise typer.BadParameter(f"'{' '.join(name)}' is no name; before it may stand {', '.join(KINDS)}")
    kind = name[0] if len(name) == 2 else None
    return {"kind": kind, "name": name[-1], "state": state, "model": model}


def _wait_drained(place: Place, held: dict[str, Any], model: str | None, timeout_s: float, *, quiet: bool) -> list[str]:
    """Wait until the part has no requests; returns those that are left."""
    deadline_s = time.monotonic() + timeout_s
    shown = -1
    while True:
        parts = query_daemon(place, name_model(model, "/admin/parts"))["parts"]
        mine = [part for part in parts if (part["kind"], part["name"]) == (held["kind"], held["name"])]
        left = [request for part in mine for request in part["requests"]]
        if not quiet and len(left) != shown:
            shown = len(left)
            sys.stderr.write(f"{held['kind']} {held['name']}: {shown} requests left\n")
        if all(part["held"] == _DRAINED for part in mine) or time.monotonic() >= deadline_s:
            return left
        time.sleep(_LOOK_S)
