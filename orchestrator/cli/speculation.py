"""`outrider speculation`: switch, fix or bound speculation for a session or a replica while the daemon serves.

An override holds for requests that start from then on, until it is taken back or the daemon ends. A request's own
`speculative_config` wins over it, and nothing goes beyond the bounds of cluster.yaml.
"""

from __future__ import annotations

import getpass
import os
from typing import Annotated, Any

import typer

from orchestrator.cli.admin_command import Daemon, daemon_command
from orchestrator.cli.daemon_socket import Place, StatusError, query_daemon
from orchestrator.cli.options import ModelName, end_with_json
from orchestrator.cli.status_lines import speculation_rows

app = typer.Typer(
    no_args_is_help=True,
    help="Switch, fix or bound speculation for a session (--user TAG) or a replica (--replica N); else for all.",
)

ROUTE = "/admin/speculation"

User = Annotated[str, typer.Option(help="The session: all requests that carry this `user` tag.")]
EngineNumber = Annotated[
    int | None, typer.Option("--replica", "--engine", min=0, help="The replica, by its number from 0.")
]
Tokens = Annotated[int, typer.Argument(min=0, max=64, help="Tokens drafted in one round; 0 is plain decoding.")]


@app.command("status")
@daemon_command
def status(
    daemon: Daemon,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the daemon said.")] = False,
    model: ModelName = None,
) -> None:
    """Show the operator's bounds, and which overrides stand, who asked for them and when."""
    first, *further = _choose(query_daemon(daemon.find_place()), model)
    shown = {**first, "models": further} if further else first
    end_with_json(shown, wanted=as_json)
    _print(shown)


def _choose(answer: dict[str, Any], model: str | None) -> list[dict[str, Any]]:
    """Return what holds for each model, or for the one that is named. Raises StatusError."""
    every = [answer, *answer["models"]]
    chosen = [target for target in every if model in (None, target["model"])]
    if not chosen:
        known = " and ".join(repr(target["model"]) for target in every)
        raise StatusError(f"there is no model '{model}' here; there is {known}")
    return [target["speculation"] | ({"model": target["model"]} if len(every) > 1 else {}) for target in chosen]


def _command(name: str, override: dict[str, Any] | None, what: str) -> None:
    @app.command(name, help=what)
    @daemon_command
    def command(daemon: Daemon, user: User = "", engine: EngineNumber = None, model: ModelName = None) -> None:
        _set_override(override, _scope(user, engine, model), daemon.find_place())


def _command_of_tokens(name: str, field: str, what: str) -> None:
    @app.command(name, help=what)
    @daemon_command
    def command(
        daemon: Daemon,
        tokens: Tokens,
        user: User = "",
        engine: EngineNumber = None,
        model: ModelName = None,
    ) -> None:
        _set_override({field: tokens}, _scope(user, engine, model), daemon.find_place())


_command("off", {"method": "off"}, "Decode plainly: every drafter is left alone.")
_command(
    "auto", {"method": "auto"}, "Leave the depth to the policy; for a session this wins over its replica's override."
)
_command_of_tokens("depth", "num_speculative_tokens", "Fix the depth: so many tokens are drafted in every round.")
_command_of_tokens("at-most", "max_speculative_tokens", "Bound the depth: the policy chooses, up to so many tokens.")
_command("reset", None, "Take back the override of a session or a replica; without either, all there are.")


def _scope(user: str, engine: int | None, model: str | None) -> dict[str, Any]:
    scope: dict[str, Any] = {"user": user} if user else {}
    scope |= {} if engine is None else {"engine": engine}
    return scope if model is None else scope | {"model": model}


def _set_override(config: dict[str, Any] | None, scope: dict[str, Any], socket: Place) -> None:
    asked_by = os.environ.get("SUDO_USER") or getpass.getuser()
    _print(query_daemon(socket, ROUTE, {**scope, "speculative_config": config, "asked_by": asked_by}))


def _print(speculation: dict[str, Any]) -> None:
    for part in (speculation, *speculation.get("models", [])):
        if "model" in part:
            print(f"model {part['model']}:")
        for name, value in speculation_rows(part):
            print(f"{name}: {value}")
