"""`outrider bench policy`: the adaptive depth policy against plain decoding and fixed depths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import ConfigFile
from orchestrator.worker.measuring.prompts import OWN_PROMPTS, read_texts
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import check_json_path, write_json


def policy(
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `turns` or `prompt`, and `category`; else six of our own.")
    ] = None,
    category: Annotated[list[str] | None, typer.Option(help="May be repeated; else all of the file's.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; may be repeated. Else 1, 2, 4, 8 and 16.")
    ] = None,
    sample: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of these, where every policy really runs; may be repeated. Else 1, 4 and 16."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Requests of a category and concurrency, at least.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each request.")] = 96,
    seed: Annotated[int, typer.Option(help="Of the order of runs.")] = 0,
    costs_s: Annotated[float, typer.Option(min=0.0, help="Seconds for measuring what forwards cost.")] = 15.0,
    config: ConfigFile = None,
    record: Annotated[Path | None, typer.Option(help="Write what replays are played from here.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Replay such a file alone; nothing is run.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Run the adaptive policy beside plain decoding, then replay all policies on what was recorded."""
    from outrider_lab.bench.policy.real import measure_real
    from outrider_lab.bench.policy.report import build_report
    from outrider_lab.bench.policy.session import plan_of, read_policy_options
    from outrider_lab.bench.policy.table import print_policies
    from outrider_lab.simulation.recording import load_recording, save_recording

    check_json_path(json_out)
    check_json_path(record, "--record")
    real = None
    if replay is not None:
        if any((prompts, category, concurrency, sample, config, record)):
            raise BenchError("--replay plays a recording as it is: give it without prompts, loads, --config, --record")
        recording = load_recording(replay)
    else:
        texts = read_texts(prompts) if prompts is not None else list(OWN_PROMPTS)
        plan = plan_of(texts, category, concurrency, sample, limit=limit, tokens=tokens, seed=seed)
        real = measure_real(read_policy_options(config, max(plan.concurrencies)), texts, plan, costs_s)
        recording = real.recording
        if record is not None:
            save_recording(recording, record)
    result = build_report(recording, real)
    write_json(json_out, result)
    print_policies(result)
    if result["mismatches"] and result["environment"]["exactness"] == "bit":
        raise BenchError(f"{len(result['mismatches'])} outputs differ; the first: {result['mismatches'][0]}")
