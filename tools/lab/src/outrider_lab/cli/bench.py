"""`outrider bench`: what decoding, serving and planning cost on this machine, with the formula beside each figure."""

from __future__ import annotations

import typer

from outrider_lab.cli.bench_cluster import cluster
from outrider_lab.cli.bench_commands import decode, exactness, pairs
from outrider_lab.cli.bench_compare import compare
from outrider_lab.cli.bench_overlap import overlap
from outrider_lab.cli.bench_plan import plan
from outrider_lab.cli.bench_policy import policy
from outrider_lab.cli.bench_serve import serve
from outrider_lab.cli.bench_shards import shards

app = typer.Typer(no_args_is_help=True, help="Measure decoding in one process, servers, plans, policies.")
app.command("cluster")(cluster)
app.command("compare")(compare)
app.command("decode")(decode)
app.command("exactness")(exactness)
app.command("overlap")(overlap)
app.command("shards")(shards)
app.command("pairs")(pairs)
app.command("plan")(plan)
app.command("policy")(policy)
app.command("serve")(serve)
