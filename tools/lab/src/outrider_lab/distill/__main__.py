"""`python -m outrider_lab.distill`: one command for each step, in their order."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from adapters.contract import AdapterError
from orchestrator.errors import OutriderError
from outrider_lab.distill.cli_head import head
from outrider_lab.distill.cli_train import export, train

app = typer.Typer(
    help="Train a draft model, or a head, on what its target says (`outrider drafts build --data`).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(export)
app.command()(head)


@app.callback()
def _commands() -> None:
    """Keep the commands' names, even of a single one."""


def main() -> int:
    """Run a command; a failure is one line on standard error and exit code 1."""
    try:
        app(standalone_mode=False)
    except (OutriderError, AdapterError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
        return 1
    except typer.Exit as ended:
        return ended.exit_code
    except typer.Abort:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
