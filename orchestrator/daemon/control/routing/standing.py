"""What was last reckoned of one replica for routing (control.replicas.fleet keeps it true). No effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from policies.serving.failover.health import Health
from policies.serving.overrides import OperatorBounds
from policies.serving.replica_load import ReplicaPace

_UNKNOWN: Final = ReplicaPace()


@dataclass(slots=True, eq=False)
class Standing:
    """`in_service`: it is to get requests, and has `failed` or not, is `ready` or not,
    and has `usable` places, as soon as its worker is there. `retires`: it only keeps streams. `serves`: it gets
    requests and its worker decodes. `decodes`: its worker does, whether it gets any or not. It has `live` streams and
    so many `places`; its KV cache holds `kv_tokens`, of which `kv_free_tokens` are free. `draft`: what proposes tokens
    there. `own_ms`: what a token took it by its pace `own_pace` with `own_sequences` at a time. `bounds` of speculation
    are those for `bounds_for`. `expected_pace`: by its own profile; replicas with the same `alike` are on
    devices that are alike. `listed`: control.replicas.fleet has it by its parts; `routed`: it may have
    streams. `health` and `steps` of its pace are those that control.routing.candidates has it by."""

    in_service: bool = False
    failed: bool = False
    retires: bool = False
    ready: bool = False
    usable: int = 0
    serves: bool = False
    decodes: bool = False
    live: int = 0
    places: int = 1
    kv_tokens: int = 0
    kv_free_tokens: int = 0
    draft: str = ""
    own_pace: ReplicaPace | None = None
    own_sequences: int = 0
    own_ms: float = 0.0
    bounds: OperatorBounds | None = None
    bounds_for: tuple[object, ...] = ()
    expected_pace: ReplicaPace = _UNKNOWN
    alike: tuple[str, ...] = ()
    listed: bool = False
    routed: bool = False
    health: Health = Health.HEALTHY
    steps: tuple[int, ...] = ()

    def find_own_ms(self, pace: ReplicaPace, sequences: int) -> float:
        """Return what a token takes the replica itself at this pace; 0 where nothing was measured."""
        if pace is not self.own_pace or sequences != self.own_sequences:
            self.own_pace, self.own_sequences = pace, sequences
            self.own_ms = pace.tpot_ms(sequences)
        return self.own_ms
