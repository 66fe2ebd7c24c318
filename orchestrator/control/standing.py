"""What was last reckoned of one replica for routing (control.fleet keeps it true). No effects."""

from __future__ import annotations

from dataclasses import dataclass

from policies.serving.overrides import OperatorBounds
from policies.serving.replica_load import ReplicaPace


@dataclass(slots=True, eq=False)
class Standing:
    """`serves`: it gets requests and its worker decodes. It has `live` streams and so many `places`. `own_ms`: what a
    token took it by its pace `own_pace` with `own_sequences` at a time. `bounds` of speculation are those for
    `bounds_for`. `device` and `listed`: where control.fleet has it in its lists."""

    serves: bool = False
    live: int = 0
    places: int = 0
    own_pace: ReplicaPace | None = None
    own_sequences: int = 0
    own_ms: float = 0.0
    bounds: OperatorBounds | None = None
    bounds_for: tuple[object, ...] = ()
    listed: bool = False

    def find_own_ms(self, pace: ReplicaPace, sequences: int) -> float:
        """Return what a token takes the replica itself at this pace; 0 where nothing was measured."""
        if pace is not self.own_pace or sequences != self.own_sequences:
            self.own_pace, self.own_sequences = pace, sequences
            self.own_ms = pace.tpot_ms(sequences)
        return self.own_ms
