"""`outrider bench`: what decoding, serving and planning cost on this machine, with the formula beside each figure."""

from __future__ import annotations

import typer

from orchestrator.cli.bench_cluster import cluster
from orchestrator.cli.bench_commands import decode, exactness, pairs
from orchestrator.cli.bench_compare import compare
from orchestrator.cli.bench_headlines import headlines
from orchestrator.cli.bench_overlap import overlap
from orchestrator.cli.bench_plan import plan
from orchestrator.cli.bench_policy import policy
from orchestrator.cli.bench_serve import serve
from orchestrator.cli.bench_shards import shards
from orchestrator.cli.bench_wan import wan

app = typer.Typer(no_args_is_help=True, help="Measure decoding in one process, servers, plans, policies.")
app.command("cluster")(cluster)
app.command("compare")(compare)
app.command("decode")(decode)
app.command("exactness")(exactness)
app.command("headlines")(headlines)
app.command("overlap")(overlap)
app.command("shards")(shards)
app.command("pairs")(pairs)
app.command("plan")(plan)
app.command("policy")(policy)
app.command("serve")(serve)
app.command("wan")(wan)
