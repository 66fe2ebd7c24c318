"""Plain and speculative decoding in turn, in one process, over the same prompts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.record import Mode, ModeRun, Prompt, measure_decoding
from orchestrator.recommend.run import environment_of, warm_up
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.measuring.canary_aside import leave_out_canary
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.summary import FORMULAS, control_ratio, list_rows, summarise_modes
from policies.sampling import Sampling


def read_decode_options(config: Path | None, exactness: str, adapter: str, concurrency: int) -> EngineOptions:
    """Return what the configuration and the flags say. Raises BenchError, ConfigError."""
    from adapters import registry
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.fitting.worker_options import engine_options

    path = config or default_config_path()
    loaded = load_config(path)
    if why := loaded.targets[0].no_drafts:
        raise BenchError(f"{loaded.model.source}: {why}: there is nothing to compare")
    options = engine_options(leave_out_canary(loaded), path.resolve().parent)
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


def load_target_with_status(options: EngineOptions) -> LoadedSource:
    """Load the target, and say meanwhile what is being done."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("loading the target") as status:
        return load_target(options, lambda stage, fraction: status.update(f"{stage} ..."))


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
            _measure_wave(loops[mode], wave, runs[mode], depth if mode == "spec" else None)
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
    waves = list(itertools.batched(submits, size)) if hasattr(itertools, "batched") else _split_batches(submits, size)
    for wave in track(waves, description="decoding", console=Console(stderr=True), transient=True):
        yield list(wave)


def _split_batches(items: Sequence[Submit], size: int) -> list[tuple[Submit, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


def _order(modes: Sequence[Mode], number: int) -> tuple[Mode, ...]:
    """Return the modes of a wave: each comes first, and last, as often as the others."""
    first = number % len(modes)
    return (*modes[first:], *modes[:first])


def _measure_wave(loop: DecodeLoop, wave: list[Submit], outcome: ModeRun, depth: int | None) -> None:
    if depth is not None:
        wave = [msgspec.structs.replace(submit, depth=depth) for submit in wave]
    measure_decoding(loop, wave, outcome)
