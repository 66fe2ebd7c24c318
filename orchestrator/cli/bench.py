"""`outrider bench`: measurements, each as a ratio inside one run."""

from __future__ import annotations

import typer

from orchestrator.cli.bench_decode import decode

app = typer.Typer(no_args_is_help=True, help="Measure: plain against speculative, in one process, warm.")
app.command("decode")(decode)
