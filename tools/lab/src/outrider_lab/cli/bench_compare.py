"""`outrider bench compare`: Outrider beside other engines on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import ConfigFile
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import check_json_path, write_json


def compare(
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `turns` or `prompt`; else of our own, of six categories.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, of a file spread evenly; 0: all.")] = 12,
    per_category: Annotated[
        int, typer.Option(min=0, help="Use the first so many prompts of each category instead; 0: see --limit.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 48,
    passes: Annotated[int, typer.Option(min=1, help="Times that each prompt is asked; the fastest one counts.")] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Requests together, beside one at a time; 1: none.")] = 8,
    quality_limit: Annotated[
        int, typer.Option(min=0, help="Score so many prompts with a float32 reference's answers; 0: no quality.")
    ] = 8,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="An engine beside Outrider, or a mode, as llama.cpp:plain; may be repeated. Else all that are known."
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="An OpenAI endpoint (.../v1); may be repeated.")
    ] = None,
    model_of: Annotated[
        list[str] | None,
        typer.Option(metavar="ENGINE=DIR", help="The model in an engine's own form; may be repeated."),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Outrider plainly with weights in this format, too, as `fast`; may be repeated."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="SOURCE", help="Compare over this model, as FILE.gguf, without a cluster.yaml.")
    ] = "",
    draft: Annotated[
        str,
        typer.Option(metavar="SOURCE", help="A draft model for engines that take one; with --model for Outrider, too."),
    ] = "",
    adapter: Annotated[
        str, typer.Option(help="Outrider's runtime, with --model of its draft, too; else as configured.")
    ] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="The endpoints' key.")] = "",
    config: ConfigFile = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write report.md into this directory.")] = None,
) -> None:
    """Ask Outrider and other engines the same prompts in turns, each in a process of its own; compare speed, quality,
    determinism and memory."""
    from outrider_lab.bench.compare.ask import build_asked, read_prompt_texts
    from outrider_lab.bench.compare.run import CompareSize, compare_engines, show_turns
    from outrider_lab.bench.compare.table import print_comparison

    check_json_path(json_out)
    if report is not None:
        try:
            report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"--report {report}: cannot be made: {error.strerror}") from error
    size = CompareSize(max_tokens, passes, at_once, quality_limit)
    asked = build_asked(
        config,
        engine or [],
        endpoint or [],
        model_of or [],
        weights or [],
        draft,
        api_key,
        at_once,
        len(os.sched_getaffinity(0)),
        model=model,
        adapter=adapter,
    )
    texts = read_prompt_texts(prompts, limit, per_category)
    with show_turns() as tell:
        result = compare_engines(asked, texts, size, tell)
    write_json(json_out, result)
    if report is not None:
        from outrider_lab.bench.compare.report import write_report

        write_report(report, result)
    print_comparison(result)
    if not any(row.get("tok_s") for row in result["summary"]):
        raise BenchError("no engine gave an answer; the table says why")
