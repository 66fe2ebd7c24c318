"""`outrider serve` whose target workers die of poison: a request with a certain seed ends the worker that decodes it.

Run by outrider_lab.chaos in the place of `outrider serve` where poison is among the faults. The product has no such
hook. The seed is POISON_SEED + n: the worker aborts when the request has n tokens, or as soon as it comes where n is 0.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from orchestrator.cli.main import main
from orchestrator.fitting import worker_options
from orchestrator.protocol.commands import Command, Submit
from orchestrator.protocol.contract import Engine, Step
from orchestrator.protocol.events import Event
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.loading.engine import build_engine

POISON_SEED = 66_600_000
MOST_TOKENS = 1000
ENTRY = "outrider_lab.chaos.poisoned:build_poisoned_engine"


class PoisonedEngine:
    """An engine that aborts its process for poison, and is otherwise the product's own."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self._deadly: dict[str, int] = {}
        self._count: Counter[str] = Counter()

    def submit(self, command: Command) -> None:
        if isinstance(command, Submit):
            after = command.sampling.seed - POISON_SEED
            if 0 <= after < MOST_TOKENS:
                self._deadly[command.request_id] = after
                self._count[command.request_id] = len(command.committed)
                self._strike(command.request_id)
        self._inner.submit(command)

    def describe_step(self) -> Step | None:
        return self._inner.describe_step()

    def run(self, emit: Callable[[Event], None]) -> None:
        def watch(event: Event) -> None:
            emit(event)
            if self._deadly and isinstance(event, RoundReport):
                for delta in event.deltas:
                    self._count[delta.request_id] += len(delta.tokens)
                    self._strike(delta.request_id)

        self._inner.run(watch)

    def _strike(self, request: str) -> None:
        if request in self._deadly and self._count[request] >= self._deadly[request]:
            os.abort()


def build_poisoned_engine(options: dict[str, Any]) -> Engine:
    return PoisonedEngine(build_engine(options))


if __name__ == "__main__":
    worker_options.ENGINE_ENTRY = ENTRY
    main()
