"""Rules that look at control's state after events: the health of parts, and whether there is hope. No effects."""

from __future__ import annotations

from orchestrator.daemon.control.actions import Action, LogLine, Settle, TellHealth, WakeAfter
from orchestrator.daemon.control.control_state import State
from orchestrator.daemon.control.replicas.replicas import has_lost_model
from policies.serving.failover.health import Health


def watch_health(state: State, now_s: float) -> list[Action]:
    """Move what can move away from parts that drain, cordon what has drained, and tell planners what has changed."""
    actions: list[Action] = []
    for part in state.health.list_held(Health.DRAINING):
        on_it = state.fleet.list_on(part)
        for replica in on_it if not state.replicas.closed else []:
            actions += state.router.retire(replica, now_s)[1]
        if not any(state.streams.counts[replica.name] for replica in on_it):
            state.health.hold(part, Health.CORDONED)
    known, state.unwell = state.unwell, state.health.weigh_parts(now_s)
    if known is state.unwell:
        return actions
    shares = {part: health.share for part, health in state.unwell.items()}
    if shares == {part: health.share for part, health in known.items()}:
        return actions
    refusing = [part for part, share in shares.items() if not share]
    fresh = [part for part in refusing if part not in known or known[part].share]
    lines = [LogLine("warning", "%s: it takes nothing new", (state.unwell[part].why,)) for part in fresh]
    waits = [wait_s for part in refusing if (wait_s := state.health.wait_s([part], now_s))]
    return [*actions, *lines, TellHealth(state.unwell), *(WakeAfter(wait_s) for wait_s in waits)]


def settle_once_ready(state: State) -> list[Action]:
    """Say, once, that a replica serves, however it came to: from the start, by a rollout, or as a standby."""
    if not state.fleet.count_ready():
        return []
    state.settled = True
    return [Settle()]


def give_up_if_hopeless(state: State, now_s: float) -> list[Action]:
    hopeless = state.fleet.all_failed and not (state.standbys.can_help or state.rollout.list_coming())
    if hopeless is state.given_up:
        return []
    state.given_up = hopeless
    return _give_up(state, state.replicas.serving[0].state.detail, now_s) if hopeless else []


def _give_up(state: State, cause: str, now_s: float) -> list[Action]:
    """No replica will ever serve, unless a reload lets one load another model: drafts wait for that."""
    drafts = [] if any(map(has_lost_model, state.replicas.serving)) else state.drafts.close()
    return [Settle(), *state.router.end_all(f"the model has failed: {cause}", now_s), *drafts]
