"""The engine of a measuring worker: does one piece of work, tells what it found, and ends."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from adapters.contract import AdapterError
from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.link import LinkProfile
from device_profiles.measured import MeasuredDevice, MeasuredModel
from orchestrator.workers.failures import describe_loading_failure
from orchestrator.workers.messages import Command, Event, Finished, MeasuredValue, Progress, Stop

Found = MeasuredDevice | MeasuredModel | PairAcceptance | TargetTexts | LinkProfile
OnProgress = Callable[[str, float], None]
KINDS: dict[str, type] = {
    "device": MeasuredDevice,
    "model": MeasuredModel,
    "pair": PairAcceptance,
    "texts": TargetTexts,
    "link": LinkProfile,
}
"""What a Measured event holds, by its kind."""


class MeasuringEngine:
    """Implements workers.contract.Engine. `work` yields what it finds; what it raises becomes a Failed event."""

    def __init__(self, work: Callable[[OnProgress], Iterator[Found]]) -> None:
        self._work = work
        self._stopped = threading.Event()

    def submit(self, command: Command) -> None:
        """See workers.contract.Engine. Before its work is done, a Stop ends nothing: who sent it ends the process."""
        if isinstance(command, Stop):
            self._stopped.set()

    def describe_step(self) -> None:
        """See workers.contract.Engine. Whoever asked for it watches it."""

    def run(self, emit: Callable[[Event], None]) -> None:
        """See workers.contract.Engine."""
        try:
            for found in self._work(lambda stage, fraction: emit(Progress(stage, fraction))):
                emit(pack_finding(found))
            emit(Finished())
            self._stopped.wait()
        except AdapterError as error:
            emit(msgspec.structs.replace(describe_loading_failure(error), restartable=False))


def pack_finding(found: Found) -> MeasuredValue:
    """Return a value as it crosses the process boundary."""
    kind: Any = next(kind for kind, known in KINDS.items() if isinstance(found, known))
    return MeasuredValue(kind, dataclasses.asdict(found))
