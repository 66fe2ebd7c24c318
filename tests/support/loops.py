"""Decode loops over real adapters, driven round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.contract import LoadedModel, LoadOptions
from adapters.grammar import GrammarCompiler
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from adapters.tokenizer import Tokenizer
from orchestrator.clock import Clock, SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.engine.grammar import Grammars
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.engine.prefix_cache import KeptPrefixes
from policies.sampling import Sampling, ToleranceGoal
from policies.serving.slo import NO_OBJECTIVES, Objectives
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import TYPICAL, start_cost_model
from policies.speculation.policy import DepthPolicy

GOAL = ToleranceGoal(acceptance_rate=0.9, warmup_tokens=64, max_delta=2.0)

END = 256
"""The simulated model's end of text."""


def toy(*, script: str = "", kv_blocks: int = 4096, rows: int = 256, slots: int = 16) -> ToyModel:
    """The simulated model; a KV block is 16 positions of 1 KiB."""
    options = LoadOptions(device="SIM", kv_cache_bytes=kv_blocks * 16 * 1024, max_batch_rows=rows, slots=slots)
    return ToyModel(Script.parse(script), options)


def suffix() -> SuffixDrafter:
    """A suffix drafter with room for earlier outputs."""
    return SuffixDrafter(max_match=16, memory_bytes=8 << 20, clock=SystemClock())


def grammars_over(tokenizer: Tokenizer, model: LoadedModel) -> Grammars:
    """Grammars over a tokenizer and the width of a model's rows."""
    return GrammarCompiler(lambda: tokenizer, model.spec.vocabulary_size)


def loop_over(
    model: LoadedModel,
    drafter: Drafter | None,
    *,
    running: int = 8,
    depth: int = 12,
    prefix_reuse: bool = True,
    max_itl_ms: float = 0.1,
    grammars: Grammars | None = None,
    tolerance: ToleranceGoal = GOAL,
    policy: DepthPolicy | None = None,
    clock: Clock | None = None,
    objectives: Objectives = NO_OBJECTIVES,
    kept: KeptPrefixes | None = None,
) -> DecodeLoop:
    """A decode loop."""
    return DecodeLoop(
        model,
        drafter,
        clock or SystemClock(),
        policy=policy or Adaptive(start_cost_model(TYPICAL)),
        max_running=running,
        max_depth=depth,
        max_itl_ms=max_itl_ms,
        prefix_reuse=prefix_reuse,
        tolerance=tolerance,
        grammars=grammars or GrammarCompiler(Tokenizer.bytes_only, model.spec.vocabulary_size),
        objectives=objectives,
        kept=kept,
    )


def decode(loop: DecodeLoop, submits: Sequence[Submit]) -> tuple[dict[str, list[int]], list[RoundReport]]:
    """Decode all requests to their ends."""
    out: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    rounds = []
    for submit in submits:
        assert loop.submit(submit) is None
    while not loop.idle:
        rounds.append(loop.run_round())
        for delta in rounds[-1].deltas:
            out[delta.request_id].extend(delta.tokens)
    return out, rounds


def requests(count: int, *, max_tokens: int = 60, **fields: Any) -> list[Submit]:
    """Requests to the simulated model, every other one sampled, with prompts of growing length."""
    return [
        Submit(
            request_id=f"r{index}",
            prompt=[60 + index, 32, 101] * (1 + index * 5),
            max_tokens=max_tokens,
            sampling=Sampling(0.9 if index % 2 else 0.0, top_p=0.95, seed=index),
            stop_tokens=[END],
            **fields,
        )
        for index in range(count)
    ]


def alone(submits: Sequence[Submit]) -> dict[str, list[int]]:
    """What the simulated model alone makes of each request, one at a time."""
    return {s.request_id: decode(loop_over(toy(), None, running=1), [s])[0][s.request_id] for s in submits}
