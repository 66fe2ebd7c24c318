"""Measures a drafter's acceptance without its target: what it proposes along texts that the target is known to say.

Output is the target's whatever was drafted, so every depth is tried over the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adapters.contract import LoadedModel, Segment
from device_profiles.acceptance import DepthYield, TargetTexts
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.worker.drafting.cache import count_common_prefix
from orchestrator.worker.drafting.port import Ask, Drafter
from policies.sampling import Sampling

# ADR 0024: acceptance is replayed at each.
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a drafter's proposals yield by depth, and what one took."""

    by_depth: tuple[DepthYield, ...]
    draft_ms: float


class _Counts:
    def __init__(self, depth: int, min_rows: int = 1) -> None:
        self.depth, self.min_rows, self.rounds = depth, min_rows, 0
        self.offered, self.accepted = [0] * depth, [0] * depth
        self.changes, self.last = 0, -1

    def add(self, offered: int, accepted: int) -> None:
        self.rounds += 1
        rows = max(1 + offered, self.min_rows)
        self.changes += self.last not in (-1, rows)
        self.last = rows
        for index in range(offered):
            self.offered[index] += 1
            self.accepted[index] += index < accepted

    def result(self) -> DepthYield:
        rounds = max(1, self.rounds)
        shares = [tuple(count / rounds for count in counts) for counts in (self.offered, self.accepted)]
        return DepthYield(self.depth, shares[0], shares[1], self.rounds, self.changes / rounds)


def replay_drafter(make: Callable[[], Drafter], texts: TargetTexts, *, min_rows: int, clock: Clock) -> Replayed:
    """Let a new drafter of each depth draft along the texts, one after another, and verify all that it drafts.
    `min_rows`: of a sequence at least."""
    by_depth, drafting_s, asks = [], 0.0, 0
    for depth in DEPTHS:
        counts, drafter = _Counts(depth, min_rows), make()
        for number, (prompt, output) in enumerate(zip(texts.prompts, texts.outputs, strict=True)):
            key, done = f"{number}", min(1, len(output))  # the first token comes with the prompt
            drafter.begin(key, [*prompt], Sampling())
            drafter.extend(key, output[:done])
            while done < len(output):
                limit = min(depth, len(output) - done)
                began = clock.monotonic_s()
                draft = drafter.propose([Ask(key, limit)])[0]
                drafting_s, asks = drafting_s + clock.monotonic_s() - began, asks + 1
                accepted = count_common_prefix(draft.tokens, output[done:])
                counts.add(len(draft.tokens), accepted)
                taken = output[done : done + accepted + 1]
                drafter.extend(key, taken)
                done += len(taken)
            drafter.end(key, keep=True)
        drafter.close()
        by_depth.append(counts.result())
    return Replayed(tuple(by_depth), drafting_s * MS_PER_S / max(1, asks))


def compare_choices(model: LoadedModel, texts: TargetTexts) -> tuple[DepthYield, ...]:
    """Return what a draft model's greedy choices yield by depth.

    A draft model behind accepted tokens chooses as it chooses along the text itself. So a single pass over each text
    tells all depths. Raises what forwards raise.
    """
    counts = [_Counts(depth) for depth in DEPTHS]
    for prompt, output in zip(texts.prompts, texts.outputs, strict=True):
        right = _right_choices(model, prompt, output)
        for count in counts:
            done = 1
            while done < len(output):
                limit = min(count.depth, len(output) - done)
                accepted = next((index for index in range(limit) if not right[done + index]), limit)
                count.add(limit, accepted)
                done += accepted + 1
    return tuple(count.result() for count in counts)


def _right_choices(model: LoadedModel, prompt: Sequence[int], output: Sequence[int]) -> list[bool]:
    text = [*prompt, *output]
    ids = model.spec.output_ids
    chosen: list[int] = []
    size = model.capabilities.max_batch_rows
    for start in range(0, len(text) - 1, size):
        part = text[start : min(start + size, len(text) - 1)]
        rows = model.forward([Segment(0, start, part, (0, len(part)))]).logits.argmax(axis=1)
        chosen += [ids[row] if ids else int(row) for row in rows]
    model.release(0)
    return [chosen[len(prompt) - 1 + index] == token for index, token in enumerate(output)]
