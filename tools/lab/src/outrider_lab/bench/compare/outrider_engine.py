"""Outrider as one of the engines of a comparison: its decode loop over the configured target, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from adapters.contract import silent
from adapters.hardware import runtime_version
from adapters.quality import log_probabilities
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.record import ModeRun, Record, measure_decoding
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.measuring.quality import feed_tokens
from outrider_lab.peers.contract import Answer, PeerPrompt, Score


@dataclass(frozen=True, slots=True)
class OutriderOptions:
    """`engine`: EngineOptions as plain values. `speculate`: with its drafters, else plainly."""

    engine: dict[str, Any]
    speculate: bool


def load(options: OutriderOptions) -> OutriderEngine:
    """Load the target. Raises what adapters raise."""
    engine = msgspec.convert(options.engine, EngineOptions)
    return OutriderEngine(load_target(engine, silent), engine, options.speculate)


class OutriderEngine:
    """One decode loop over all requests, which learns what rounds cost, as a server's does."""

    def __init__(self, target: LoadedSource, options: EngineOptions, speculate: bool) -> None:
        self._target, self._options, self._speculate = target, options, speculate
        self._requests = 0
        self._drafter: Drafter | None = None
        self._build()

    def describe(self) -> dict[str, str]:
        caps, its = self._target.model.capabilities, self._options.model
        drafts = ", ".join(draft.name for draft in self._options.drafters) if self._speculate else "none"
        return {
            "version": f"outrider {version('outrider')}, {its.adapter} ({runtime_version(its.adapter)})",
            "weights": caps.weights,
            "activations": caps.activations.value,
            "kv_cache": caps.kv_cache.value,
            "threads": str(its.threads),
            "exactness": caps.exactness.value,
            "drafts": drafts,
        }

    def generate(self, prompt: PeerPrompt, max_tokens: int) -> Answer:
        return self.generate_many([prompt], max_tokens)[0]

    def generate_many(self, prompts: Sequence[PeerPrompt], max_tokens: int) -> list[Answer]:
        submits = []
        for prompt in prompts:
            self._requests += 1
            submits.append(Submit(str(self._requests), prompt.tokens, max_tokens, stop_tokens=prompt.stop_tokens))
        outcome = ModeRun("spec" if self._speculate else "plain")
        measure_decoding(self._loop, submits, outcome)
        return [self._answer(outcome.records[submit.request_id]) for submit in submits]

    def score(self, tokens: Sequence[int]) -> Score:
        """See PeerEngine: by the target that verifies."""
        rows = feed_tokens(self._target.model, list(tokens[:-1]))
        self._target.model.release(0)
        return Score(log_probabilities(rows, tokens[1:]), [int(token) for token in rows.argmax(axis=1)])

    def forget(self) -> None:
        """See PeerEngine: drafters remember earlier outputs."""
        if self._drafter is not None:
            self._drafter.close()
            self._build()

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()
        self._target.model.close()

    def _build(self) -> None:
        self._drafter = build_drafter(self._options, self._target) if self._speculate else None
        self._loop = build_loop(self._target, self._options, self._drafter)

    def _answer(self, record: Record) -> Answer:
        stats = record.stats if self._speculate else None
        told = (stats.steps, stats.drafted, stats.accepted) if stats is not None else (None, None, None)
        return Answer(record.tokens, record.first_s, record.last_s, *told)
