"""The engine of a measuring worker: does one piece of work, tells what it found, and ends."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from adapters.contract import AdapterError
from orchestrator.protocol.commands import Command, Stop
from orchestrator.protocol.events import Event, Finished, MeasuredValue, Progress
from orchestrator.protocol.failures import describe_loading_failure
from orchestrator.protocol.measuring import KINDS, Finding

OnProgress = Callable[[str, float], None]


class MeasuringEngine:
    """Implements protocol.contract.Engine. `work` yields what it finds; what it raises becomes a Failed event."""

    def __init__(self, work: Callable[[OnProgress], Iterator[Finding]]) -> None:
        self._work = work
        self._stopped = threading.Event()

    def submit(self, command: Command) -> None:
        """Before its work is done, a Stop ends nothing: who sent it ends the process."""
        if isinstance(command, Stop):
            self._stopped.set()

    def describe_step(self) -> None:
        """Whoever asked for it watches it."""

    def run(self, emit: Callable[[Event], None]) -> None:
        try:
            for finding in self._work(lambda stage, fraction: emit(Progress(stage, fraction))):
                emit(pack_finding(finding))
            emit(Finished())
            self._stopped.wait()
        except AdapterError as error:
            emit(msgspec.structs.replace(describe_loading_failure(error), restartable=False))


def pack_finding(finding: Finding) -> MeasuredValue:
    kind: Any = next(kind for kind, known in KINDS.items() if isinstance(finding, known))
    return MeasuredValue(kind, dataclasses.asdict(finding))
