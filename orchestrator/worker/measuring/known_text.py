"""A target that says what another one is known to say, in no time.

With it the worth of drafts where a policy chooses depths can be tried in the real decode loop. The loop runs any number
of requests at once, without the target.

A forward moves a clock of its own by its predicted time. So a policy that learns from times learns the same as on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adapters.contract import ForwardResult, LoadedModel, Logits, Segment
from device_profiles.acceptance import DepthYield, TargetTexts
from device_profiles.cost import StepCost
from device_profiles.measured import RoundOverhead
from device_profiles.units import MS_PER_S
from orchestrator.worker.measuring.watched import forward_of


class Hours:
    """A clock that only goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class KnownText:
    """Implements the contract's LoadedModel over texts. `like`: the model whose capabilities it has. A forward takes
    `cost` and `overhead` by `clock`.

    Only forwards without prompts are counted: `drafted[d]`: the drafts of d tokens; `accepted[i]`: those of which the
    first i + 1 tokens are what the text says.
    """

    def __init__(
        self, like: LoadedModel, texts: TargetTexts, cost: StepCost, overhead: RoundOverhead, clock: Hours, bound: int
    ) -> None:
        self.spec, self.capabilities = like.spec, replace(like.capabilities, best_logits=0)
        self._texts = {prompt: (*prompt, *output) for prompt, output in zip(texts.prompts, texts.outputs, strict=True)}
        self._cost, self._overhead, self._clock = cost, overhead, clock
        self._held: dict[int, list[int]] = {}
        self._text: dict[int, tuple[int, ...]] = {}
        self._rows = np.zeros((64, self.spec.outputs), np.float32)
        self._ran = 0
        self._rounds = self._changed = 0
        self.drafted = [0] * (bound + 1)
        self.accepted = [0] * bound

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        tokens = [token for segment in batch for token in self._read_next_tokens(segment)]
        of = forward_of(batch, self.capabilities)
        changed = of.run_rows != self._ran
        self._ran = of.run_rows
        ms = self._overhead.ms(of.sequences, of.rows)
        if of.sequences:
            ms += self._cost.ms(of.rows, of.sequences, of.context_tokens, changes=float(changed))
        if of.prompt_rows:
            ms += self._cost.chunk_ms(of.prompt_rows, of.prompt_behind, beside=of.sequences > 0)
        else:
            self._count(batch, tokens, changed=changed)
        self._clock.now_s += ms / MS_PER_S
        return ForwardResult(self._logits(tokens), ms)

    def result(self, depth: int) -> DepthYield:
        turns = max(1, sum(self.drafted))
        offered = tuple(sum(self.drafted[place + 1 :]) / turns for place in range(depth))
        accepted = tuple(count / turns for count in self.accepted[:depth])
        sequences = max(1.0, turns / max(1, self._rounds))
        steady = 1.0 - self._changed / max(1, self._rounds)
        return DepthYield(depth, offered, accepted, turns, 1.0 - steady ** (1.0 / sequences))

    def count_cached_positions(self, slot: int) -> int:
        return len(self._held.get(slot, ()))

    def free_blocks(self) -> int:
        return self.capabilities.total_blocks

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        return 0

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        return 0

    def share(self, slot: int, tokens: Sequence[int]) -> None: ...

    def release(self, slot: int) -> None:
        self._held.pop(slot, None)
        self._text.pop(slot, None)

    def discard(self, slot: int) -> None:
        self.release(slot)

    def close(self) -> None: ...

    def _read_next_tokens(self, segment: Segment) -> list[int]:
        held = self._held.setdefault(segment.slot, [])
        held[segment.start :] = segment.tokens
        if segment.rows[0] == segment.rows[1]:
            return []
        if segment.slot not in self._text:
            self._text[segment.slot] = self._texts[tuple(held[: segment.start + segment.rows[0] + 1])]  # its prompt
        text = self._text[segment.slot]
        places = range(segment.start + segment.rows[0] + 1, segment.start + segment.rows[1] + 1)
        return [text[place] if place < len(text) else 0 for place in places]

    def _logits(self, tokens: Sequence[int]) -> Logits:
        if len(self._rows) < len(tokens):
            self._rows = np.zeros((2 * len(tokens), self.spec.outputs), np.float32)
        rows = self._rows[: len(tokens)]
        rows[:] = 0.0
        rows[np.arange(len(tokens)), tokens] = 1.0
        return rows

    def _count(self, batch: Sequence[Segment], outputs: Sequence[int], *, changed: bool) -> None:
        self._rounds += 1
        self._changed += changed
        at = 0
        for segment in batch:
            drafts = list(segment.tokens[1:])
            right = outputs[at : at + len(drafts)]
            at += len(segment.tokens)
            wrong = [index for index, token in enumerate(drafts) if token != right[index]]
            count = min(wrong, default=len(drafts))
            self.drafted[len(drafts)] += 1
            for index in range(count):
                self.accepted[index] += 1
