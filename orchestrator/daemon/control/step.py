"""Control's decisions: one event folded into the state, then a chain of rules. No effects, no clock, no I/O.

Only `step` changes a State. It returns actions in order (control.actions), and control.controller carries them out.
After every event the same rules look at the state: a rollout advances where it can, and streams that are due are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from device_profiles.device_load import name_device_counters
from orchestrator.daemon.control import events
from orchestrator.daemon.control.actions import (
    Action,
    FinishRollout,
    LogLine,
    Notify,
    TellLacking,
    TellLoads,
    TellRefused,
    TellStage,
    TellStarved,
    TellUseless,
    WakeAfter,
)
from orchestrator.daemon.control.control_state import State as State
from orchestrator.daemon.control.health.health import Part
from orchestrator.daemon.control.health.rules import give_up_if_hopeless, settle_once_ready, watch_health
from orchestrator.daemon.control.replicas.fold_worker import fold_worker_event, lose_worker
from orchestrator.daemon.control.replicas.replicas import Rank
from orchestrator.protocol.events import Failed
from policies.serving.failover.health import Health
from policies.serving.residency import ModelStage

_OBSERVED = (Notify, TellLoads, TellLacking, TellRefused, TellStarved, TellUseless, TellStage)
_SHUTTING_DOWN = "the server is shutting down; send the request again"


def step(state: State, event: events.ControlEvent, now_s: float) -> list[Action]:
    """Fold an event into the state; returns what is to be done, in order. Observers come last: what they ask for then
    follows all of that. Raises RequestError where a stream cannot be opened; nothing has changed then.

    A rule that has nothing to do costs no call: most events are tokens of streams and new requests.
    """
    actions = _fold(state, event, now_s)
    _follow_rules(state, actions, now_s)
    for action in actions[:-1]:
        if isinstance(action, _OBSERVED):
            actions.sort(key=lambda action: isinstance(action, _OBSERVED))
            break
    return actions


def _follow_rules(state: State, actions: list[Action], now_s: float) -> None:
    if now_s >= state.loads.look_s:
        actions += state.loads.forget_stale(now_s)
    actions += _advance_changes(state, now_s)
    if state.standbys.any:
        actions += state.standbys.advance(now_s)
    if state.steering.has_failovers or state.health.holds:
        actions += state.steering.advance(now_s)
    if state.drafts.looks(now_s):
        actions += state.drafts.advance(now_s)
    state.fleet.refresh()
    if not state.settled:
        actions += settle_once_ready(state)
    if state.fleet.all_failed or state.given_up:
        actions += give_up_if_hopeless(state, now_s)
    if not state.health.quiet or state.unwell:
        actions += watch_health(state, now_s)
    if not state.replicas.closed:
        actions += state.router.feed(now_s)
        if not state.watch.scheduled and state.works:
            actions.append(WakeAfter(state.watch.schedule_look(now_s)))


def _advance_changes(state: State, now_s: float) -> list[Action]:
    """Go on with exchanges of workers, of their options, and of what is in memory."""
    actions: list[Action] = []
    exchanged = state.rollout.under_way
    if exchanged:
        actions += state.rollout.advance(now_s)
    if state.retuning.under_way:
        actions += state.retuning.advance()
    if state.residency.changes:
        state.fleet.refresh()
        actions += state.residency.advance_stage(now_s, failed=state.fleet.all_failed, exchanged=exchanged)
    return actions


def _fold(state: State, event: events.ControlEvent, now_s: float) -> list[Action]:
    """Fold an event. The most frequent ones come first."""
    match event:
        case events.WorkerSaid() | events.WorkerStarted() | events.WorkerEnding() | events.WorkerEnded():
            replica = state.replicas.find_by_worker(event.worker)
            if replica is None and (preparing := state.standbys.find_preparing(event.worker)) is not None:
                return state.standbys.observe_preparing(preparing, event, now_s)
            if replica is None:
                return _fold_draft_worker(state, event, now_s)
            return fold_worker_event(state, replica, event, now_s)
        case events.StreamOpened():
            return _open_stream(state, event, now_s)
        case events.StreamClosed():
            stream = state.streams.find_live(event.stream)
            return state.router.end(stream, now_s) if stream is not None else []
        case events.QuarantineReleased():
            state.blame.release(event.digests)
            return []
        case events.LoadObserved():
            return _fold_loads(state, event, now_s)
        case events.Woke():
            _hear_workers(state, event.heard, now_s)
            return _end_hung(state, now_s)
        case events.PartHeld():
            return _hold_part(state, event.part, event.state)
    if isinstance(event, events.ChangeEvent):
        return _fold_change(state, event, now_s)
    if isinstance(event, events.PhaseEvent):
        return _fold_phase(state, event, now_s)
    return state.steering.fold(event, now_s)


def _open_stream(state: State, event: events.StreamOpened, now_s: float) -> list[Action]:
    """Take in a request. Raises RequestError where no replica serves it."""
    if (refusal := state.router.refuse(event.submit)) is not None:
        raise refusal
    state.streams.open(event.submit, event.overrides, now_s)
    return []


def _fold_draft_worker(state: State, event: events.WorkerEvent, now_s: float) -> list[Action]:
    """Something became of a draft worker. One whose model was replaced before it was loaded is started again."""
    if isinstance(event, events.WorkerEnded):
        state.residency.observe_ended(event.worker)
    life = state.drafts.find_life(event.worker)
    if isinstance(event, events.WorkerSaid) and life is not None and life.running:
        why = state.identities.learn(life.spec, event.event)
        return life.end(Failed(why, restartable=True)) if why else state.drafts.observe_worker(event, now_s)
    return state.drafts.observe_worker(event, now_s)


def _fold_change(state: State, event: events.ChangeEvent, now_s: float) -> list[Action]:
    match event:
        case events.RolloutAsked():
            chosen = (
                [] if event.standbys is None else state.standbys.choose(event.standbys, state.standbys.rules, now_s)
            )
            if event.draft_pools is not None:
                state.drafts.set_sizes(event.draft_pools)
            return [*chosen, *_ask_rollout(state, event, now_s)]
        case events.RetuneAsked():
            return _ask_retune(state, event, now_s)
        case events.RulesChanged():
            return _change_rules(state, event)
        case events.RolloutDropped():
            return state.rollout.drop()
        case events.ModelLoadAsked():
            return state.residency.load(now_s)
        case events.ModelLeaveAsked():
            busy = state.rollout.under_way or state.retuning.under_way
            return [] if busy else state.residency.unload_when_idle(event.gone_for)


def _ask_rollout(state: State, event: events.RolloutAsked, now_s: float) -> list[Action]:
    """Have other workers, at once where the model is in memory, else from its next load on."""
    residency = state.residency
    residency.drafts = event.drafts
    if residency.stage in (ModelStage.UNLOADED, ModelStage.UNLOADING):
        closing, engines = state.rollout.exchange_idle(event.targets)
        residency.mark_unloaded()
        return [*closing, FinishRollout(engines)]
    kept = residency.load(now_s)  # where it was to leave
    residency.begin_anew(now_s)
    return [*kept, *state.rollout.ask(event.targets, event.drafts)]


def _ask_retune(state: State, event: events.RetuneAsked, now_s: float) -> list[Action]:
    state.drafts.set_sizes(event.draft_pools)
    replicas = [replica for replica in state.replicas.primary if not replica.standby]
    asking = state.retuning.ask(replicas, event.targets)
    chosen = state.standbys.choose(event.standbys, state.standbys.rules, now_s)
    return [*asking, *chosen, *state.residency.run_drafts(event.drafts)]


def _change_rules(state: State, event: events.RulesChanged) -> list[Action]:
    state.around.take_figures(event.surroundings)
    state.blame.quarantine_s = event.quarantine_s
    state.standbys.rules = event.failover
    state.router.set_rules(event.least_depth, event.failover)
    return []


def _fold_phase(state: State, event: events.PhaseEvent, now_s: float) -> list[Action]:
    """From nothing to serving, and from there to the end."""
    live = len(state.streams)
    match event:
        case events.WorkersChosen():
            for engine, spec in enumerate(event.targets):
                state.replicas.create(spec, engine, Rank.SERVING)
            state.router.set_failover(event.failover)
            state.residency.drafts = event.drafts
            return [
                *state.standbys.choose(event.standbys, event.failover, now_s),
                *state.drafts.run_these(event.drafts),
            ]
        case events.ClusterOpened():
            if state.residency.managed:
                return state.residency.open(now_s)
            return [action for replica in state.replicas.serving for action in replica.begin(now_s)]
        case events.ClusterFailed():
            for replica in state.replicas.serving:
                replica.state.mark_failed(event.cause)
            return state.standbys.choose((), state.standbys.rules, now_s)
        case events.DrainBegun():
            state.draining = True
            text = "draining: %d streams are being finished, for %g s at most"
            return [LogLine("info", text, (live, event.timeout_s))]
        case events.DrainOver():
            line = LogLine("warning", "drain timed out after %g s: %d streams are cut off", (event.timeout_s, live))
            return [*([line] if live else []), *state.router.end_all(_SHUTTING_DOWN, now_s)]
        case events.ControlClosed():
            state.draining = True
            closed = [*state.standbys.close(), *state.drafts.close(), *state.replicas.close()]
            return [*state.router.end_all(_SHUTTING_DOWN, now_s), *closed]


def _fold_loads(state: State, event: events.LoadObserved, now_s: float) -> list[Action]:
    queues: dict[str, int] = {}
    for device in event.samples:
        here = state.fleet.list_on_device(device)
        behind = [state.streams.counts.get(replica.name, 0) - replica.places for replica in here]
        queues[device] = sum(max(0, waiting) for waiting in behind)
    changes: list[Action] = []
    for device, why in state.loads.find_faults(event.samples).items():
        changes += _leave_device(state, device, why, now_s)
    changes += state.loads.observe_samples(event.samples, queues, now_s)
    for device in event.samples:
        for replica in state.fleet.list_on_device(device):
            if replica.untold:
                replica.learn(state.loads.explain_last_rounds(replica.spec))
    return [*changes, TellLoads(event.samples, state.loads.list_loads(event.samples))]


def _leave_device(state: State, device: str, why: str, now_s: float) -> list[Action]:
    """Start nothing on a device that says it does not work, and let streams go on elsewhere."""
    here = state.fleet.list_on_device(device)
    spelt = (part for replica in here for part in replica.parts if name_device_counters(part.name) == device)
    parts = {Part("device", device), *spelt}
    fresh = [part for part in parts if not state.health.judge([part], now_s).refuses]
    state.health.observe_fault(parts, why, now_s)
    elsewhere = [other for other in state.replicas.serving if other.state.ready is not None and other not in here]
    if not fresh or not elsewhere or state.replicas.closed:
        return []
    return [action for replica in here for action in state.router.retire(replica, now_s)[1]]


def _hear_workers(state: State, heard: Sequence[int], now_s: float) -> None:
    for number in heard:
        if (replica := state.replicas.find_by_worker(number)) is not None:
            replica.life.heard_s = now_s
    for life in state.drafts.list_loading() if heard else ():
        if life.number in heard:
            life.heard_s = now_s


def _end_hung(state: State, now_s: float) -> list[Action]:
    actions: list[Action] = []
    for life, why in state.watch.find_hung(state.list_watched(), now_s):
        actions.append(LogLine("error", "%s hangs: %s; it is ended", (life.title, why)))
        actions += life.end(Failed(f"it hung: {why}", restartable=True, kind="hung"))
        if (replica := state.replicas.find_by_worker(life.number)) is not None:
            actions += lose_worker(state, replica, why, "hung", now_s)
    return actions


def _hold_part(state: State, part: Part, held: Health | None) -> list[Action]:
    state.health.hold(part, held)
    (state.steering.observe_release if held is None else state.steering.observe_hold)(part)
    return [LogLine("info", "%s: %s", (part, held.value if held is not None else "may work again"))]
