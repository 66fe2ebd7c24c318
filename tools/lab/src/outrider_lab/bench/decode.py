"""Plain and speculative decoding in turn, in one process, over the same prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.plain_table import print_lines
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.record import Mode, ModeRun, Prompt, measure_decoding
from orchestrator.recommend.run import environment_of, warm_up
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource, load_target
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.result import print_formulas, print_rows
from outrider_lab.bench.selection import read_configured
from outrider_lab.bench.summary import FORMULAS, control_ratio, list_rows, summarise_modes
from policies.sampling import Sampling


def read_decode_options(config: Path | None, exactness: str, adapter: str, concurrency: int) -> EngineOptions:
    """Return what the configuration and the flags say. Raises BenchError, ConfigError."""
    from adapters import registry

    loaded, options = read_configured(config)
    if why := loaded.targets[0].no_drafts:
        raise BenchError(f"{loaded.model.source}: {why}: there is nothing to compare")
    # Both modes decode the same prompts in turn: neither may find the other's prefill done.
    options = msgspec.structs.replace(options, max_running=max(concurrency, options.max_running), prefix_reuse=False)
    changes: dict[str, str] = {}
    if exactness:
        if exactness not in ("bit", "kernel"):
            raise BenchError(f"--exactness is bit or kernel, not {exactness!r}")
        changes["exactness"] = exactness
    if adapter:
        if adapter not in registry.names():
            raise BenchError(f"--adapter is one of {', '.join(registry.names())}, not {adapter!r}")
        changes["adapter"] = adapter
    if not options.drafters or options.max_depth == 0:
        raise BenchError("the configuration switches speculation off: there is nothing to compare")
    return options.with_model(**changes)


def load_target_with_status(options: EngineOptions, *, refresh: bool = False) -> LoadedSource:
    """Load the target, and say meanwhile what is being done."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("loading the target") as status:
        return load_target(options, lambda stage, fraction: status.update(f"{stage} ..."), refresh=refresh)


def measure_modes(
    target: LoadedSource,
    options: EngineOptions,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    max_tokens: int,
    concurrency: int,
    sampling: Sampling,
    depth: int | None,
    *,
    control: bool = False,
    warm: bool = True,
) -> dict[str, Any]:
    """Measure both modes and return the whole result (`summary`, `runs`, `environment`, `formulas`). With a `control`,
    a second plain run is taken in turn with them, and the summary has its `control_ratio`.
    Without `warm` the caller has warmed up.

    Each mode has one loop for all its waves, which learns what rounds cost, and one drafter drafts for all speculative
    ones, as in a server. Plain waves have none and teach it nothing.
    """
    submits = [
        Submit(
            request_id=f"{index}-{prompt.key}",
            prompt=prompt.tokens,
            max_tokens=max_tokens,
            sampling=dataclasses.replace(sampling, seed=sampling.seed + index),
            stop_tokens=prompt.stop_tokens,
        )
        for index, prompt in enumerate(prompts)
    ]
    if warm:
        warm_up(target, options, drafter)
    modes: tuple[Mode, ...] = ("plain", "spec", "control") if control else ("plain", "spec")
    runs = {mode: ModeRun(mode) for mode in modes}
    loops = {mode: build_loop(target, options, drafter if mode == "spec" else None) for mode in modes}
    for number, wave in enumerate(_waves(submits, concurrency)):
        for mode in _order(modes, number):
            own = depth if mode == "spec" else None
            measure_decoding(loops[mode], [msgspec.structs.replace(one, depth=own) for one in wave], runs[mode])
    summary = summarise_modes(runs["plain"], runs["spec"], prompts)
    if control:
        summary["control_ratio"] = control_ratio(runs["plain"], runs["control"])
    return {
        "summary": summary,
        "runs": [list_rows(outcome, prompts) for outcome in runs.values()],
        "environment": {
            **environment_of(target, options),
            "concurrency": concurrency,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "depth": "policy" if depth is None else depth,
        },
        "formulas": FORMULAS,
    }


def _waves(submits: Sequence[Submit], concurrency: int) -> Iterator[list[Submit]]:
    """Alternate between the modes often, so that a drift of the machine meets both."""
    from rich.console import Console
    from rich.progress import track

    size = 1 if concurrency == 1 else concurrency * 4
    starts = range(0, len(submits), size)
    for start in track(starts, description="decoding", console=Console(stderr=True), transient=True):
        yield list(submits[start : start + size])


def _order(modes: Sequence[Mode], number: int) -> tuple[Mode, ...]:
    """Return the modes of a wave: each comes first, and last, as often as the others."""
    first = number % len(modes)
    return (*modes[first:], *modes[:first])


_COLUMNS = {
    "category": "{category}",
    "prompts": "{prompts}",
    "TTFT ms": "{spec_ttft_ms:.0f}",
    "plain TPOT ms": "{plain_tpot_ms:.2f}",
    "spec TPOT ms": "{spec_tpot_ms:.2f}",
    "speed-up": "{tpot_speed_up:.2f}x",
    "acceptance": "{acceptance_rate:.2f}",
    "mean length": "{mean_acceptance_length:.2f}",
}


def print_decode(result: dict[str, Any]) -> None:
    """Print the table by category, the totals, the formulas, and whether outputs were identical."""
    summary, environment = result["summary"], result["environment"]
    title = (
        f"{environment['model']} on {environment['adapter']} {environment['device']}, "
        f"{environment['activations']}, exactness {environment['exactness']}, "
        f"concurrency {environment['concurrency']}"
    )
    categories = [*summary["categories"].items(), ("all", summary)]
    print_rows(title, _COLUMNS, ({**row, "category": name} for name, row in categories))
    print_lines(
        f"tokens/s, prefill included: plain {summary['plain_tok_s']:.1f}, "
        f"speculative {summary['spec_tok_s']:.1f} ({summary['speed_up']:.2f}x); "
        f"orchestration {summary['overhead_share']:.1%} of a speculative round, "
        f"{summary['plain_overhead_share']:.1%} of a plain one"
    )
    print_formulas(result["formulas"])
    same = "yes" if summary["identical"] else "NO"
    print_lines(f"identical output: {same} ({summary['prompts']} prompts, token for token)")
