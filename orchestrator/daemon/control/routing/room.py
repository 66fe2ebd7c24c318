"""Whether a request can be taken in, by control's own counts: nothing is looked at replica by replica. No effects."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.daemon.control.control_state import State
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.streams.admission import ONE, Asked, ControlLimits, Crowd, refuse_crowd, refuse_or_pass


def check_room(
    state: State, limits: ControlLimits, look: Callable[[], StateView], now_s: float, asked: Asked = ONE
) -> None:
    """Raise RequestError where a request cannot be taken in now. Where no replica is ready, or all are held, the view
    that `look` returns says why."""
    fleet = state.fleet
    fleet.refresh()
    if state.draining or not fleet.count_ready() or (state.health.holds and _are_held(state, now_s)):
        refuse_or_pass(look(), limits, state.streams, now_s, asked)
        return
    crowd = Crowd(len(state.streams), fleet.count_hopeful(), fleet.count_usable_places())
    refuse_crowd(crowd, limits, state.streams, now_s, asked)


def _are_held(state: State, now_s: float) -> bool:
    """True where an operator keeps work away from every replica: mostly the first one that is asked for says no."""
    return all(
        state.health.judge(one.parts, now_s, one.name).held for one in state.replicas.serving if not one.standing.failed
    )
