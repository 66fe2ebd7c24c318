"""Decodes the shipped prompts with the real loop, plainly and with drafts, alone and together, all in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from adapters.energy import EnergyMeter
from adapters.tokenizer import load_tokenizer
from device_profiles.acceptance import DepthYield, TargetTexts
from device_profiles.cost import StepCost
from device_profiles.measured import RoundOverhead
from device_profiles.units import ceil_div
from orchestrator.clock import Clock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions, SuffixOptions
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.measuring.known_text import Hours, KnownText
from orchestrator.worker.measuring.prompts import CATEGORIES, TEXTS
from orchestrator.worker.measuring.rounds import Decoding, RoundSample, at_pace, fit_rounds, in_turns
from orchestrator.worker.measuring.watched import WatchedModel
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import start_cost_model

# ADR 0033: what 24 texts of so many tokens need in rounds is known to 6 %.
OUTPUT_TOKENS = 96
# Sequences that say the texts. ADR 0033. Not tuned.
_TOGETHER = 8
# Of each loop's work, in turn with the others'. ADR 0033: forwards' times are correlated over 0.3 to 1.5 s, so turns
# are shorter than that.
_PARTS = 24


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop: which of the prompts, how many at once, and whether it drafts."""

    submits: list[Submit]
    at_once: int
    drafts: bool


@dataclass(frozen=True, slots=True)
class LiveLoopResult:
    """What real decoding showed. `cost`: as forwards take on average there. `outputs`: what the target said to the
    first prompts, in their order."""

    cost: StepCost
    overhead: RoundOverhead
    outputs: tuple[tuple[int, ...], ...]
    energy_j_per_token: float | None


def prompts_of(loaded: LoadedSource) -> list[Submit]:
    tokenizer = load_tokenizer(loaded.tokenizer_dir)
    caps = loaded.model.capabilities
    room = min(caps.max_context_tokens, caps.block_tokens * caps.total_blocks)
    submits = []
    for number, (_, text) in enumerate(TEXTS):
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        tokens = min(OUTPUT_TOKENS, room - len(prompt) - caps.min_rows)
        if tokens > 0:
            submits.append(Submit(f"{number}", prompt, tokens, stop_tokens=sorted(tokenizer.eos_ids)))
    return submits


def talk(
    loaded: LoadedSource,
    engine: EngineOptions,
    cost: StepCost,
    clock: Clock,
    meter: EnergyMeter,
    *,
    texts: TargetTexts | None,
) -> LiveLoopResult:
    """Decode. `cost`: of forwards, as fitted. `texts`: what the target says, where that is known: then only one prompt
    of each category is said again. Raises DeviceLost."""
    submits = prompts_of(loaded)
    engine = msgspec.structs.replace(
        engine, prefix_reuse=False, drafters=[draft for draft in engine.drafters if isinstance(draft, SuffixOptions)]
    )
    first = submits if texts is None else submits[:CATEGORIES]
    loops = [
        _Loop(first, _TOGETHER, drafts=False),
        _Loop(submits[:1], 1, drafts=False),
        _Loop(submits[1:3], 1, drafts=True),
        _Loop(submits[2:7], 4, drafts=True),
    ]
    before = meter.joules()
    decodings = _decode_loops(loaded, engine, [loop for loop in loops if loop.submits], cost, clock)
    after = meter.joules()
    rounds: list[RoundSample] = [sample for decoding in decodings for sample in decoding.rounds]
    spent = None if before is None or after is None else after - before
    tokens = sum(sample.tokens for sample in rounds)
    overhead, cost = fit_rounds(rounds, cost)
    outputs = tuple(tuple(decodings[0].outputs[submit.request_id]) for submit in first) if decodings else ()
    return LiveLoopResult(
        at_pace(rounds, cost, overhead), overhead, outputs, spent / tokens if spent is not None and tokens else None
    )


def measure_policy_yield(
    loaded: LoadedSource, engine: EngineOptions, texts: TargetTexts, real: LiveLoopResult, sequences: int, bound: int
) -> DepthYield:
    """Return what the engine's drafts yield where the policy chooses depths up to a bound, with so many requests at
    once.

    It runs the real loop over texts that are known, on the costs that real decoding showed.
    """
    clock = Hours()
    known = KnownText(loaded.model, texts, real.cost, real.overhead, clock, bound)
    target = replace(loaded, model=known)
    engine = msgspec.structs.replace(engine, prefix_reuse=False, max_running=sequences, max_depth=bound)
    drafter = build_drafter(engine, target)
    loop = build_loop(target, engine, drafter, Adaptive(start_cost_model(real.cost)), clock)
    for number, (prompt, output) in enumerate(zip(texts.prompts, texts.outputs, strict=True)):
        loop.submit(Submit(f"{number}", [*prompt], len(output)))
    while not loop.idle:
        loop.run_round_strictly()
    if drafter is not None:
        drafter.close()
    return known.result(bound)


def _decode_loops(
    loaded: LoadedSource, engine: EngineOptions, loops: list[_Loop], cost: StepCost, clock: Clock
) -> list[Decoding]:
    """Decode in turns where the KV cache has room for all of them, else one after another."""
    decodings, slot, blocks = [], 0, 0
    caps = loaded.model.capabilities
    drafters = []
    for loop in loops:
        watched = WatchedModel(loaded.model, slot)
        target = replace(loaded, model=watched)
        drafter = build_drafter(engine, target) if loop.drafts else None
        if drafter is not None:
            drafters.append(drafter)
        alike = msgspec.structs.replace(engine, max_running=loop.at_once)
        made = build_loop(target, alike, drafter, Adaptive(start_cost_model(cost)))
        decodings.append(Decoding(made, watched, loop.submits, clock))
        longest = max(len(submit.prompt) + submit.max_tokens for submit in loop.submits) + caps.min_rows
        blocks += made.max_running * (ceil_div(longest, caps.block_tokens) + 1)
        slot += loop.at_once
    parts = _PARTS if blocks <= caps.total_blocks and slot <= caps.slots else 1
    for _ in in_turns(decodings, parts):
        pass
    for drafter in drafters:
        drafter.close()
    return decodings
