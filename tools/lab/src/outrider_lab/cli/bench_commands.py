"""`outrider bench decode`, `exactness` and `pairs`: all that they need is loaded where something is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import ConfigFile
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import write_json


def decode(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `turns` (the first is used) or `prompt`.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 128,
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, spread evenly; 0: all.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in the loop at the same time.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; each next one has the next seed.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    depth: Annotated[int | None, typer.Option(min=1, help="A fixed depth; else the policy chooses.")] = None,
    exactness: Annotated[str, typer.Option(help="bit or kernel; else as configured.")] = "",
    adapter: Annotated[str, typer.Option(help="The runtime; else as configured.")] = "",
    config: ConfigFile = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Decode every prompt plainly and with speculation, in turn; compare the tokens one by one."""
    from orchestrator.recommend.run import read_prompts
    from orchestrator.worker.loading.drafters import build_drafter
    from outrider_lab.bench.decode import load_target_with_status, measure_modes, print_decode, read_decode_options
    from policies.sampling import Sampling

    options = read_decode_options(config, exactness, adapter, concurrency)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    target = load_target_with_status(options)
    loaded = read_prompts(prompts, target, limit)
    drafter = build_drafter(options, target)
    result = measure_modes(target, options, drafter, loaded, max_tokens, concurrency, sampling, depth)
    if drafter is not None:
        drafter.close()
    target.model.close()
    write_json(json_out, result)
    print_decode(result)
    if result["environment"]["exactness"] == "bit" and not result["summary"]["identical"]:
        raise BenchError(f"{result['summary']['mismatches']} of {len(loaded)} outputs differ")


def pairs(
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `turns` or `prompt`; else six of our own.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 48,
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, spread evenly; 0: all.")] = 6,
    depth: Annotated[int | None, typer.Option(min=1, help="A fixed depth; else the policy chooses.")] = None,
    only: Annotated[str, typer.Option(help="Pairs whose name this regular expression finds.")] = "",
    config: ConfigFile = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Decode with every draft on every target of this machine, greedy and sampled; compare the tokens one by one."""
    from outrider_lab.bench.pairs import measure_pairs, print_pairs, read_pairs_options

    options = read_pairs_options(config)
    result = measure_pairs(options, only, prompts, limit, max_tokens, depth)
    write_json(json_out, result)
    print_pairs(result)
    count = result["summary"]["pairs"]
    wrong = count - result["summary"]["identical_pairs"]
    if wrong and options.model.exactness == "bit":
        raise BenchError(f"{wrong} of {count} pairs failed, or gave other tokens than the target alone")


def exactness(
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `turns` or `prompt`; else six of our own.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 64,
    limit: Annotated[int, typer.Option(min=0, help="Use this many prompts, spread evenly; 0: all.")] = 0,
    quality_limit: Annotated[
        int, typer.Option(min=0, help="Compare so many prompts with a float32 reference; 0: leave perplexity out.")
    ] = 16,
    adapter: Annotated[str, typer.Option(help="The runtime; else as configured.")] = "",
    config: ConfigFile = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the whole result here.")] = None,
) -> None:
    """Find the numerical class anew, decode in it with and without speculation, compare with a float32 reference."""
    from outrider_lab.bench.decode import read_decode_options
    from outrider_lab.bench.exactness import CONCURRENCIES, measure_exactness, print_exactness

    options = read_decode_options(config, "bit", adapter, max(CONCURRENCIES))
    summary = measure_exactness(options, prompts, limit, max_tokens, quality_limit)
    write_json(json_out, {"summary": summary})
    print_exactness(summary)
    if summary["mismatches"]:
        raise BenchError(f"{summary['mismatches']} of {summary['compared']} outputs differ")
