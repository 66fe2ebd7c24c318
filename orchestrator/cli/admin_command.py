"""One declaration for commands that ask a daemon: which one, and whether its answer is printed as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.daemon_socket import ANSWER_S, Place, query_daemon, socket_of
from orchestrator.cli.options import print_json


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon that a command line names; each field is an option of the command."""

    config: Annotated[Path | None, typer.Option("--config", help="The daemon's cluster.yaml, to find its socket.")] = (
        None
    )
    port: Annotated[int | None, typer.Option("--port", help="The daemon's API port, where it is not api.port.")] = None
    socket: Annotated[Path | None, typer.Option("--socket", help="The admin socket itself.")] = None
    url: Annotated[
        str | None,
        typer.Option("--url", help="The API's URL, instead of the socket; the key is read from OUTRIDER_KEY."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print what the daemon said.")] = False

    def find_place(self) -> Place:
        """Return where to ask: what is named, OUTRIDER_URL, or cluster.yaml's admin socket. Raises ConfigError."""
        return self.url or self.socket or socket_of(self.config, self.port)

    def ask(
        self, route: str, body: dict[str, Any] | None = None, *, answer_s: float | None = ANSWER_S
    ) -> dict[str, Any]:
        """Return what it answers, as `query_daemon` does; with --json that is printed, and the command is over."""
        answer = query_daemon(self.find_place(), route, body, answer_s=answer_s)
        if self.as_json:
            print_json(answer)
            raise typer.Exit
        return answer


def daemon_command(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a daemon, behind its own and before those that are keywords only. It takes
    the `Daemon` as its first argument."""
    return _add_options(command, _FIELDS[:-1])


def admin_command(command: Callable[..., None]) -> Callable[..., None]:
    """Do as `daemon_command`, with --json beside them: see `Daemon.ask`."""
    return _add_options(command, _FIELDS)


_FIELDS = tuple(inspect.signature(Daemon, eval_str=True).parameters.values())


def _add_options(command: Callable[..., None], options: Sequence[inspect.Parameter]) -> Callable[..., None]:
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    keywords = [parameter for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    parameters = [parameter for parameter in own if parameter not in keywords] + [*options] + keywords

    @wraps(command)
    def run(**given: Any) -> None:
        daemon = Daemon(**{option.name: given.pop(option.name) for option in options})
        command(daemon, **given)

    shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    vars(run)["__signature__"] = inspect.Signature(shown)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run
