"""Which runs are made, for real and simulated: where, under which load, with or without drafts, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Place = Literal["one worker", "two workers", "unlike workers", "three hosts"]
"""One daemon on this machine with a worker on all cores. The same with a worker on each of two halves of the cores. The
same where these have unlike runtimes. A daemon over Ray on three hosts, network namespaces of this machine, with a
worker on two of them."""
RUNTIME = "openvino_rt"
UNLIKE_RUNTIMES = ("onnx_rt", RUNTIME)
"""Those of unlike workers. What goes wrong hits the last one, which is the faster one and has most to do."""
FaultName = Literal["", "kill_worker", "kill_host", "cut_link"]


@dataclass(frozen=True, slots=True)
class ValidationRun:
    """One run. `concurrency` requests at a time, or `share` of the rate that the place can carry, by the calibration.
    With `fault` something goes wrong behind half of its requests. `turn`: of a run that is made several times.
    `member`: the one of unlike workers that all requests ask for, by its number (-1: none); `beside`: whether the other
    one has as many at a time meanwhile."""

    place: Place
    speculates: bool
    concurrency: int = 0
    share: float = 0.0
    requests: int = 24
    arrival: Literal["poisson", "constant"] = "poisson"
    fault: FaultName = ""
    mixed: bool = False
    turn: int = 0
    member: int = -1
    beside: bool = False

    @property
    def name(self) -> str:
        """For people, and for `--only`."""
        load = f"{self.concurrency} at a time" if self.concurrency else f"open loop at {self.share:.0%}"
        parts = (self.place, load, "long and short" if self.mixed else "", "drafts" if self.speculates else "plain")
        return ", ".join(part for part in (*parts, self.fault.replace("_", " ")) if part)

    @property
    def ignores_ends(self) -> bool:
        """Whether outputs go on to their bound: what unlike workers say differs, and so would their lengths."""
        return self.place == "unlike workers"


RUNS: tuple[ValidationRun, ...] = (
    ValidationRun("one worker", False, 1, requests=10),
    ValidationRun("one worker", True, 1, requests=12),
    ValidationRun("one worker", False, 4),
    ValidationRun("one worker", True, 4),
    ValidationRun("one worker", False, 8, requests=32),
    ValidationRun("one worker", True, 8, requests=32),
    ValidationRun("one worker", True, share=0.5, requests=45),
    ValidationRun("one worker", True, share=0.6, requests=45, mixed=True),
    ValidationRun("one worker", True, 4, requests=24, fault="kill_worker"),
    ValidationRun("two workers", False, 4),
    ValidationRun("two workers", True, 4),
    ValidationRun("two workers", True, 4, fault="kill_worker"),
    ValidationRun("unlike workers", False, 1, requests=16),
    ValidationRun("unlike workers", False, 4),
    ValidationRun("unlike workers", False, 8, requests=32),
    ValidationRun("unlike workers", False, share=0.6, requests=40),
    ValidationRun("unlike workers", False, 4, fault="kill_worker"),
    ValidationRun("three hosts", False, 4, requests=20),
    ValidationRun("three hosts", True, 4, requests=20),
    ValidationRun("three hosts", True, 4, requests=20, fault="cut_link"),
)
TURNS = 2
"""So often each run is made, with other prompts where it drafts: a machine is now faster and now slower."""
PLACES: tuple[Place, ...] = ("one worker", "two workers", "unlike workers", "three hosts")


def list_turn(runs: Sequence[ValidationRun], turn: int) -> list[ValidationRun]:
    """Return runs in the order in which they are made for the time `turn`, from 0. Every other time it is the other way
    round, so that drifts hit both ends alike. Those in which something goes wrong come last."""
    made = [replace(run, turn=turn) for run in runs]
    steady = [run for run in made if not run.fault]
    return [*(reversed(steady) if turn % 2 else steady), *(run for run in made if run.fault)]
