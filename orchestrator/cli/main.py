"""`outrider`: the entry point. Every failure is one readable line on standard error and a non-zero exit code."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from adapters.contract import AdapterError
from orchestrator.cli import bench, canary, config, keys, models, plan, quarantine, service, speculation, submit
from orchestrator.cli.batch import batch
from orchestrator.cli.devices import devices
from orchestrator.cli.doctor import doctor
from orchestrator.cli.explain import explain
from orchestrator.cli.health import cordon, health, uncordon
from orchestrator.cli.profile import profile
from orchestrator.cli.serve import serve
from orchestrator.cli.status import status
from orchestrator.errors import OutriderError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Bit-exact speculative decoding across unlike devices.",
)
app.command("serve")(serve)
app.command("batch")(batch)
app.command("status")(status)
app.command("health")(health)
app.command("explain")(explain)
app.command("cordon")(cordon)
app.command("uncordon")(uncordon)
app.command("doctor")(doctor)
app.command("devices")(devices)
app.command("profile")(profile)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(submit.app, name="submit")
app.add_typer(plan.app, name="plan")
app.add_typer(models.app, name="models")
app.add_typer(speculation.app, name="speculation")
app.add_typer(canary.app, name="canary")
app.add_typer(quarantine.app, name="quarantine")
app.add_typer(keys.app, name="keys")
app.add_typer(service.app, name="service")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Bit-exact speculative decoding across unlike devices."""


def main() -> None:
    """Run the command line. OUTRIDER_TRACEBACK=1 shows where a failure came from."""
    try:
        app()
    except (OutriderError, AdapterError) as error:
        if os.environ.get("OUTRIDER_TRACEBACK"):
            raise
        for line in str(error).splitlines():
            sys.stderr.write(f"outrider: {line}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
