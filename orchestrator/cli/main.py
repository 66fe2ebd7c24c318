"""`outrider`: the entry point. Every failure is one readable line on standard error and a non-zero exit code."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from orchestrator.cli.foreign_commands import LABORATORY, LazyGroup, find_command, list_names
from orchestrator.errors import OutriderError

_OWN = {
    "init": "orchestrator.cli.init:init",
    "serve": "orchestrator.cli.serve:serve",
    "join": "orchestrator.cli.join:join",
    "batch": "orchestrator.cli.batch:batch",
    "reload": "orchestrator.cli.reload:reload",
    "status": "orchestrator.cli.status_command:status",
    "health": "orchestrator.cli.hold:health",
    "alerts": "orchestrator.cli.alerts:app",
    "explain": "orchestrator.cli.explain:explain",
    "cordon": "orchestrator.cli.hold:cordon",
    "uncordon": "orchestrator.cli.hold:uncordon",
    "drain": "orchestrator.cli.hold:drain",
    "failover": "orchestrator.cli.failover:failover",
    "draft": "orchestrator.cli.draft:app",
    "drafts": "orchestrator.cli.drafts:app",
    "requests": "orchestrator.cli.requests:requests",
    "cancel": "orchestrator.cli.requests:cancel",
    "extras": "orchestrator.cli.extras:app",
    "doctor": "orchestrator.cli.doctor:doctor",
    "devices": "orchestrator.cli.devices:devices",
    "build-kernels": "orchestrator.cli.build_kernels:build_kernels",
    "profile": "orchestrator.cli.profile:profile",
    "config": "orchestrator.cli.config:app",
    "submit": "orchestrator.cli.submit:app",
    "plan": "orchestrator.cli.plan:app",
    "models": "orchestrator.cli.models:app",
    "speculation": "orchestrator.cli.speculation:app",
    "canary": "orchestrator.cli.canary:app",
    "quarantine": "orchestrator.cli.requests:app",
    "keys": "orchestrator.cli.keys:app",
    "service": "orchestrator.cli.service:app",
    "logs": "orchestrator.cli.logs:logs",
    "top": "orchestrator.cli.top:top",
    "completion": "orchestrator.cli.completion:completion",
    "support-bundle": "orchestrator.cli.support_bundle:support_bundle",
}


class _Commands(LazyGroup):
    """Outrider's own commands, and those that other distributions bring."""

    places = _OWN

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(LABORATORY)
        self.commands.update(names)  # names alone, as of its own ones

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*_OWN, *list_names()]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or find_command(cmd_name)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Bit-exact speculative decoding across unlike devices.",
)


COMPLETION_VARIABLE = "_OUTRIDER_COMPLETE"
"""What a shell sets where it wants to complete a line, as typer's scripts do."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Bit-exact speculative decoding across unlike devices."""


def _list_told_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are told in a line. Adapters' are among them where theirs were imported."""
    contract = sys.modules.get("adapters.contract")
    return (OutriderError,) if contract is None else (OutriderError, contract.AdapterError)


def main() -> None:
    """Run the command line. OUTRIDER_TRACEBACK=1 shows where a failure came from."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would read what every installed package says
    if COMPLETION_VARIABLE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()  # typer does so by itself for --install-completion alone
    try:
        app(prog_name="outrider")
    except _list_told_errors() as error:
        if os.environ.get("OUTRIDER_TRACEBACK"):
            raise
        for line in str(error).splitlines():
            sys.stderr.write(f"outrider: {line}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
