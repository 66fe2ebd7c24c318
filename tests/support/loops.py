"""Decode loops over real adapters, driven round by round."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import LoadedModel, LoadOptions
from adapters.grammar import GrammarCompiler
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.cluster.port import Round, Submit
from orchestrator.decoding.grammar import Grammars
from orchestrator.decoding.loop import DecodeLoop
from orchestrator.drafting.port import Drafter
from orchestrator.drafting.suffix import SuffixDrafter
from policies.acceptance import ToleranceGoal

GOAL = ToleranceGoal(acceptance_rate=0.9, warmup_tokens=64, max_delta=2.0)


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
) -> DecodeLoop:
    """A decode loop."""
    return DecodeLoop(
        model,
        drafter,
        SystemClock(),
        max_running=running,
        max_depth=depth,
        max_itl_ms=max_itl_ms,
        prefix_reuse=prefix_reuse,
        tolerance=tolerance,
        grammars=grammars,
    )


def decode(loop: DecodeLoop, submits: Sequence[Submit]) -> tuple[dict[str, list[int]], list[Round]]:
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
