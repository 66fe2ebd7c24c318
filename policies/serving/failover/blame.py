"""Which request may be blamed for the deaths of its workers.

A request that kills its worker must not do so for ever, and no other request may be blamed for it. Deaths are counted
over a request's whole life, whatever it had in between. Enough of them make it a suspect. A suspect is tried: it runs
alone in a worker that has run nothing else. Only a death there is proof. How much proof depends on how the worker
died: a worker that is killed from outside says little of what it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

LossKind = Literal["crashed", "hung", "memory", "killed", "device", "host"]
"""How a worker was lost:

- "crashed": it ended by itself, by a signal of its own or an exception.
- "hung": it finished no round.
- "memory": the kernel ended it, for want of memory.
- "killed": somebody else ended it, or whoever did is not known.
- "device": its device failed.
- "host": its host, its link or its cluster is away.
"""

LOSS_KINDS: Final[tuple[LossKind, ...]] = get_args(LossKind)

_SUSPICION: Final[dict[LossKind, tuple[int, int]]] = {
    "crashed": (4, 2),
    "hung": (4, 2),
    "memory": (2, 0),
    "killed": (1, 0),
    "device": (2, 1),
    "host": (0, 0),
}
"""By the kind of loss: of a request that had run there for less than SETTLED_TOKENS, and of one that had run longer.
What kills a worker mostly does so at once, so the former waits for a worker of its own and harms no other. One that got
its worker killed from outside later goes on from there in the next one, and gets that killed at once."""
# ADR 0046: a request that kills mostly kills at its start. Also what closes a breaker (ADR 0053).
SETTLED_TOKENS: Final = 16
# ADR 0046: one early crash, or two late ones. It follows from the weights above.
SUSPECT_FROM: Final = 4
_PROOF: Final[dict[LossKind, int]] = {"crashed": 6, "hung": 4, "memory": 2, "killed": 1, "device": 2, "host": 0}
"""Of a death alone in a worker of its own. Whoever kills workers from outside may hit any, and the kernel may take one
for what another process holds. That is proof only where the request had just begun there: one that gets its workers
killed has, each time. Where the kernel says that it ended nobody, it hardly was the request's doing. A program that
watches memory in the kernel's place would be no more seen than any other."""
# ADR 0046: one crash alone, two hangs, three deaths by memory, six kills; three kills had hit an innocent one.
CONVICTED_FROM: Final = 6
_BY_CHANCE: Final[frozenset[LossKind]] = frozenset({"memory", "killed"})
_UNPROVEN: Final = 2
"""So many times as much proof is asked for while no other request has had a token since: the device may be broken. ADR
0046."""
# ADR 0046: four times as many a death, up to this: longer than most answers.
_LONGEST_PROBATION_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Death:
    """A worker's death, as one request saw it. `number`: of the death, the same for all that ran there. `settled`:
    the request had SETTLED_TOKENS in that worker; `alone`: nothing else had ever run there."""

    number: int
    kind: LossKind
    settled: bool
    alone: bool


def weigh_suspicion(deaths: Sequence[Death]) -> int:
    """Return how suspicious these deaths make a request; from SUSPECT_FROM on it is a suspect."""
    return sum(_SUSPICION[death.kind][death.settled] for death in deaths)


def is_suspect(deaths: Sequence[Death]) -> bool:
    """True when the request is to be tried alone."""
    return weigh_suspicion(deaths) >= SUSPECT_FROM


def convicts(deaths: Sequence[Death], *, others_progress: bool) -> bool:
    """True when these deaths prove that the request is their cause. `others_progress`: some other request has had a
    token since the first of them."""
    proof = sum(
        _PROOF[death.kind] for death in deaths if death.alone and not (death.kind in _BY_CHANCE and death.settled)
    )
    return proof >= CONVICTED_FROM * (1 if others_progress else _UNPROVEN)


def probation_tokens(deaths: Sequence[Death]) -> int:
    """Return how many tokens a suspect is to have alone before anything else joins it: four times as many after each
    further death."""
    further = min(10, max(0, len(deaths) - 1))
    return min(_LONGEST_PROBATION_TOKENS, SETTLED_TOKENS << 2 * further)
