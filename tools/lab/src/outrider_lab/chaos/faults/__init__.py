"""The kinds of faults, by name."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_lab.chaos.faults.base import Fault
from outrider_lab.chaos.faults.clocks import ClockJump
from outrider_lab.chaos.faults.links import CutLink, RayHead, RayNode, SlowLink
from outrider_lab.chaos.faults.memory import OutOfMemory
from outrider_lab.chaos.faults.processes import KillDaemon, KillDraft, KillTarget, StopDraft, StopTarget, Suspend
from outrider_lab.chaos.faults.storage import CorruptArtefact, DiskFull
from outrider_lab.chaos.faults.traffic import Competitor, Poison, SlowClients
from outrider_lab.chaos.service import Layout

KINDS: dict[str, type[Fault]] = {
    kind.kind: kind
    for kind in (
        *(KillTarget, KillDraft, StopTarget, StopDraft, Suspend, OutOfMemory, DiskFull, ClockJump, CorruptArtefact),
        *(CutLink, SlowLink, RayNode, RayHead, KillDaemon, Poison, SlowClients, Competitor),
    )
}


def choose_kinds(asked: Sequence[str], layout: Layout) -> tuple[list[type[Fault]], dict[str, str]]:
    """Return the kinds to use, and the reasons why other ones that were asked for cannot be. Empty: all of them."""
    obstacles = {name: _find_obstacle(KINDS[name], layout) for name in (asked or KINDS)}
    return [KINDS[name] for name, why in obstacles.items() if not why], {n: why for n, why in obstacles.items() if why}


def _find_obstacle(kind: type[Fault], layout: Layout) -> str:
    if "draft" in kind.kind and layout.drafts == 0:
        return "there are no draft workers: --drafts 1"
    return kind.find_obstacle(layout)
