"""`outrider join`: be a host of another machine's cluster."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from orchestrator.launch.node_keeper import NodeKeeper, NodeState

Front = Annotated[
    str, typer.Argument(metavar="FRONT[:PORT]", help="The host with the daemon, and the port of its cluster: 6379.")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="A file with the cluster's token; else it is asked for, once.")
]
OwnAddress = Annotated[
    str, typer.Option("--address", help="This host's address for the others; else that of its way to the front.")
]


def join(front: Front, token_file: TokenFile = None, address: OwnAddress = "") -> None:
    """Let this host run workers for the daemon of another one, until Ctrl-C or SIGTERM.

    It starts Ray's node here, and starts it again whenever it ends, the link was cut, or the front has a new cluster.
    Both hosts need the same Outrider, Python and Ray. The token is the front's (~/.ray/auth_token of its user): whoever
    has it runs code on all hosts.
    """
    import asyncio

    from orchestrator.config.hosts import add_head_port
    from orchestrator.launch.node_keeper import NodeKeeper
    from orchestrator.launch.ray_settings import driver_environment
    from orchestrator.machine.core_dumps import limit_core_dumps

    place = add_head_port(front)
    environment = driver_environment(place, has_token=True, environment=_add_token(token_file))
    limit_core_dumps()
    keeper = NodeKeeper(place, environment, _tell_states(place), own_address=address)
    asyncio.run(_keep(keeper))


def _add_token(token_file: Path | None) -> dict[str, str]:
    """Return this process's environment with where the token is. One that was asked for is kept for the next time."""
    from orchestrator.launch.ray_settings import read_token, save_token

    environment = dict(os.environ)
    if token_file is not None:
        environment.pop("RAY_AUTH_TOKEN", None)
        environment["RAY_AUTH_TOKEN_PATH"] = str(token_file.absolute())
    elif not read_token(environment) and sys.stdin.isatty():
        token = typer.prompt("The cluster's token (~/.ray/auth_token of the front)", hide_input=True, err=True)
        typer.echo(f"kept in {save_token(token, environment)}", err=True)
    return environment


async def _keep(keeper: NodeKeeper) -> None:
    import asyncio

    keeping = asyncio.create_task(keeper.keep_node(), name="keep the Ray node")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, keeping.cancel)
    with suppress(asyncio.CancelledError):
        await keeping


def _tell_states(place: str) -> Callable[[NodeState], None]:
    """Return what prints each change of state, and tells systemd."""
    from orchestrator.daemon.systemd.notify import Notifier

    notifier, last = Notifier(), [""]

    def tell(state: NodeState) -> None:
        line = {
            "starting": f"joins {place} as {state.own_address}",
            "joined": f"is a host of {place} as {state.own_address}",
            "waiting": f"waits for {place}: {state.why}",
        }[state.phase]
        if line != last[0]:
            last[0] = line
            print(f"{time.strftime('%H:%M:%S')} outrider join: {line}", flush=True)
        if state.phase == "joined":
            notifier.ready(line)
        else:
            notifier.status(line)

    return tell
