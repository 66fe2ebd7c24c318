"""What becomes of a replica's worker, and what it says, folded into control's state. No effects."""

from __future__ import annotations

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.actions import (
    Action,
    EndStream,
    LogLine,
    Notify,
    TellGauges,
    TellLacking,
    TellRefused,
    TellStarved,
)
from orchestrator.daemon.control.control_state import State
from orchestrator.daemon.control.events import WorkerEnded, WorkerEnding, WorkerEvent, WorkerSaid, WorkerStarted
from orchestrator.daemon.control.health.blame import NO_RETRY, refuse
from orchestrator.daemon.control.health.health import list_parts
from orchestrator.daemon.control.port import Hindrance
from orchestrator.daemon.control.replicas.replicas import Rank, Replica
from orchestrator.daemon.control.replicas.worker_life import NO_DEATH
from orchestrator.daemon.control.state import STARTING
from orchestrator.daemon.control.streams.streams import Stream
from orchestrator.errors import ContextExceeded, RequestError
from orchestrator.protocol import events
from orchestrator.protocol.draft_messages import DraftLink
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, Refused, RoundReport
from policies.serving.failover.blame import LossKind

_NOT_SERVING = (Rank.JOINING, Rank.LEAVING, Rank.STANDBY)
_TRIED_AGAIN = ("not_finite", "elsewhere")
# A step of a load that takes longer is told again, so that nobody waits for 5 s. ADR 0108: every 4 s.
_QUIET_MS = 4000.0
_NOT_OF_ITS_PLACE = ("model_replaced", "storage", "network", "endpoint")  # another device or runtime would fail as well
# Of a replica that is joining: nobody waits for a host that is not there. ADR 0062.
_HOST_TRIES = 2


def fold_worker_event(state: State, replica: Replica, event: WorkerEvent, now_s: float) -> list[Action]:
    match event:
        case WorkerStarted():
            if not replica.life.coming:
                replica.state.where = event.where
                return []
            replica.observe_start(event.where, now_s)
            return replica.life.observe_start(event.where, now_s)
        case WorkerSaid():
            if not replica.life.running:  # it is being ended: whatever it had is somebody else's
                return replica.life.observe_event(event.event, now_s)
            return _hear(state, replica, event.event, now_s)
        case WorkerEnding():
            replica.life.observe_ending()
            return lose_worker(state, replica, event.cause, event.kind, now_s)
        case WorkerEnded():
            state.residency.observe_ended(event.worker)
            return _replace_worker(state, replica, event.cause, event.kind, now_s)


def _hear(state: State, replica: Replica, message: events.Event, now_s: float) -> list[Action]:
    if isinstance(message, RoundReport):
        state.loads.observe_round(replica.spec, message.device_ms)
        beside = state.fleet.is_beside(replica)
        replica.see_round(message, sampled=state.loads.samples(replica.device), beside=beside)
        replica.life.hear_round(message.round_ms, now_s)
        if replica.rank in _NOT_SERVING:
            replica.state.observe_event(message)
            return []
        return _fold_round(state, replica, message, now_s)
    chosen: list[Action] = []
    if why := state.identities.learn(replica.spec, message):
        return replica.life.end(events.Failed(why, restartable=True))
    if why := state.identities.agree(message):
        return replica.life.end(events.Failed(why, restartable=True, kind="other_class"))
    if isinstance(message, Ready):
        replica.forget_prompts(message)
        replica.state.start_s = now_s - replica.state.due_s
        chosen = state.steering.observe_ready(replica, message.drafting.drafters)
    return [*replica.life.observe_event(message, now_s), *_fold_said(state, replica, message, now_s), *chosen]


def _fold_said(state: State, replica: Replica, event: events.Event, now_s: float) -> list[Action]:
    """Fold an event of a replica's worker. Of one that is joining or leaving nobody waits for anything."""
    if isinstance(event, events.PagesEndpoint):
        state.router.moves.endpoints[replica.worker] = event.endpoint
        return []
    if replica.rank in _NOT_SERVING:
        replica.state.observe_event(event)
        return state.standbys.observe_ready(replica) if isinstance(event, Ready) else []
    if isinstance(event, Ready):
        return _fold_ready(state, replica, event, now_s)
    before = replica.state.gauges
    replica.state.observe_event(event)
    match event:
        case Gauges():
            state.drafts.observe_gauges(replica.name, event, now_s)
            return [TellGauges(replica.name, before, event)]
        case events.Progress():
            return [Notify(event)]
        case events.StillWorking(stage, pulse) if pulse.expected_ms < 0.0 and pulse.quiet_ms >= _QUIET_MS:
            return [Notify(events.Progress(f"{stage} ({pulse.quiet_ms / MS_PER_S:.0f} s of this step so far)", -1.0))]
        case events.Retuned():
            return _fold_retuned(state, replica, event)
        case events.MovedOut():
            return state.router.moves.observe_out(event, now_s)
        case events.MovedIn():
            return state.router.moves.observe_in(event, now_s)
        case DraftLink():
            up, link = event.state == "connected", f"{replica.name}-{event.name}"
            state.health.observe_link(link, connected=up, reason=event.reason, now_s=now_s)
            return state.drafts.observe_link(replica.name, event, now_s)
        case Refused():
            stream = state.streams.find_sent(event.request_id)
            return _fold_refused(state, replica, stream, event, now_s) if stream is not None else []
        case _:
            return []


def _fold_refused(state: State, replica: Replica, stream: Stream, refused: Refused, now_s: float) -> list[Action]:
    """End a stream that its worker does not go on with, but try once more where another may."""
    if refused.kind in _TRIED_AGAIN and not stream.failed_at:
        why = "it computed no finite number for it" if refused.kind == "not_finite" else refused.message
        line = LogLine("warning", "request %s is tried again: worker %s: %s", (stream.key, replica.name, why))
        state.router.fail_over(stream, why, refused.kind, now_s)
        return [line]
    state.streams.drop(stream, refused.kind, now_s)
    return [EndStream(stream.key, _build_refusal(refused, stream))]


def _fold_round(state: State, replica: Replica, done: RoundReport, now_s: float) -> list[Action]:
    if replica.engine:
        deltas = [msgspec.structs.replace(delta, engine=replica.engine) for delta in done.deltas]
        done = msgspec.structs.replace(done, deltas=deltas, engine=replica.engine)
    state.health.observe_round(replica.name, replica.parts, done, now_s)
    actions: list[Action] = []
    delivered, changed = 0, state.streams.changed_groups
    for delta in done.deltas:
        delivery = state.streams.deliver(delta, now_s)
        if delivery is not None:
            actions.append(delivery)
            if delivery.delta.tokens:
                delivered += len(delivery.delta.tokens)
                replica.observe_progress(delivery.stream)
    if state.streams.changed_groups != changed:
        state.changed_groups[replica.engine] += state.streams.changed_groups - changed
    state.replicas.count_for_successor(replica, done, delivered)
    replica.state.observe_event(done, delivered)
    actions += state.streams.take_resumed()
    actions.append(Notify(done))
    return actions


def _fold_ready(state: State, replica: Replica, ready: Ready, now_s: float) -> list[Action]:
    actions: list[Action] = []
    first = replica.rank is Rank.SERVING and replica.state.ready is None and not replica.standby
    if first and (why := state.replicas.refuse(replica, ready, state.replicas.primary)):
        return replica.life.end(events.Failed(f"{replica.name} serves with {why}", restartable=False, kind="unlike"))
    again = " again" if replica.state.phase != STARTING else ""
    replica.life.served = True
    replica.state.observe_event(ready)
    held = state.streams.held
    streams = f", {held} held stream{'s' * (held > 1)} can go on" if held else ""
    values = (replica.name, again, replica.state.where, streams)
    actions.append(LogLine("info", "worker %s ready%s: %s%s", values))
    if replica.rank is Rank.SERVING:
        actions += state.drafts.target_ready(replica.name, replica.worker, ready)
    return actions


def _fold_retuned(state: State, replica: Replica, answer: events.Retuned) -> list[Action]:
    """A worker decodes by other options: draft workers are attached again, since it has other drafters."""
    actions = state.retuning.observe_answer(replica, answer)
    if answer.ready is None:
        return actions
    replica.state.replace_ready(answer.ready)
    chosen = state.steering.observe_ready(replica, answer.ready.drafting.drafters)
    return [*actions, *state.drafts.target_ready(replica.name, replica.worker, answer.ready), *chosen]


def lose_worker(state: State, replica: Replica, cause: str, kind: LossKind, now_s: float) -> list[Action]:
    """A replica's worker is of no use any more, whatever is left of its process: its streams are due again. One that
    was refused, is to rest, or is to run in another class is no loss. Neither its streams nor its device nor its host
    are to blame."""
    if replica.death is not None:
        return []
    replica.death = next(state.blame.numbers)
    state.retuning.forget(replica.worker)
    state.drafts.forget_links(replica.name)
    if replica.life.resting:
        replica.state.mark_unloaded(cause)
        return []
    cause, kind = replica.life.explain(cause, kind)
    replica.state.mark_worker_lost(cause)
    blameless = replica.life.refused or replica.life.changes_class
    if not state.replicas.closed:
        if not blameless:
            charged = list_parts(replica.spec, first=True)
            state.health.observe_loss(replica.name, charged, kind, replica.life.failure_kind, cause, now_s)
        state.standbys.observe_lost(replica)
    if state.replicas.closed or replica.rank not in (Rank.SERVING, Rank.RETIRING):
        return []
    seen = state.router.recall_streams(replica, now_s)
    if blameless:
        return []
    state.losses[replica.engine, kind] += 1
    convicted = state.blame.observe_death(replica.death, kind, cause, seen, now_s)
    if convicted is None:
        return []
    text = "request %s is refused from now on: it ended %d workers, alone in the last; %s"
    actions: list[Action] = [LogLine("error", text, (convicted.request_id, convicted.deaths, cause))]
    error = refuse(convicted, now_s)
    guilty = [stream for stream in state.streams.live() if stream.digest == convicted.digest]
    return actions + [action for stream in guilty for action in state.router.end(stream, now_s, error)]


def _replace_worker(state: State, replica: Replica, cause: str, kind: LossKind, now_s: float) -> list[Action]:
    actions = lose_worker(state, replica, cause, kind, now_s)
    number = replica.death if replica.death is not None else NO_DEATH
    hopeless = replica.rank is Rank.JOINING or not any(replica.life.served for replica in state.replicas.with_streams)
    explained = state.blame.explained
    wait_s = state.health.wait_s(replica.parts, now_s)
    state.router.moves.endpoints.pop(replica.worker, None)
    hindrance = _find_hindrance(replica, cause, kind)
    starved = replica.life.starved
    longest = max((len(stream.submit.prompt) + stream.submit.max_tokens for stream in state.streams.live()), default=0)
    loss = replica.life.observe_end(
        *(cause, kind, now_s),
        number=number,
        explained=explained,
        hopeless=hopeless,
        wait_s=wait_s,
        longest_tokens=longest,
    )
    if loss.restart:
        state.residency.observe_loss()
        replica.state.mark_restarting(loss.restart, now_s + loss.after_s, spent=loss.spent, hindrance=hindrance)
        actions += [TellStarved(replica.spec)] if starved and not replica.standby else []
    actions += loss.actions
    if replica.rank is Rank.JOINING and replica.life.budget.count("host") >= _HOST_TRIES:
        replica.state.mark_failed(cause)
    if loss.spent and replica.rank is Rank.SERVING:
        actions += state.drafts.detach_target(replica.name)
    if loss.failure:
        actions += _tell_planner(state, replica, loss.failure)
        replica.state.mark_failed(loss.failure, hindrance)
        actions.append(LogLine("error", "worker %s failed: %s", (replica.name, loss.failure)))
        if replica.rank is Rank.SERVING:
            actions += state.drafts.detach_target(replica.name)
    state.replicas.forget_ended(replica)
    return actions


def _find_hindrance(replica: Replica, cause: str, kind: LossKind) -> Hindrance:
    """Return what is to change before a worker can serve there, by how the last one ended."""
    failed = replica.life.failure_kind
    if failed == "unlike":
        return "unlike"
    if failed == "endpoint":
        return "server"
    return "host" if replica.life.explain(cause, kind)[1] == "host" else ""


def _tell_planner(state: State, replica: Replica, why: str) -> list[Action]:
    """Tell whoever plans that a replica will never serve where it is, unless its device and runtime are not why."""
    failed = replica.life.failure_kind
    if replica.standby or failed in _NOT_OF_ITS_PLACE:
        return []
    if failed == "not_installed":
        return [TellLacking(replica.spec, why)]
    served = [other for other in state.replicas.list_all() if other.life.served and other.device == replica.device]
    if any(_find_runtime(other) == _find_runtime(replica) for other in served):
        return []
    return [TellRefused(replica.spec, why)]


def _find_runtime(replica: Replica) -> object:
    return replica.spec.options.get("model", {}).get("adapter")


def _build_refusal(event: Refused, stream: Stream) -> RequestError:
    if event.kind == "too_long":
        submit = stream.submit
        return ContextExceeded(event.most_tokens, len(submit.prompt), param=None, wanted_tokens=submit.max_tokens)
    if event.kind == "invalid":
        return RequestError(event.message, status=400)
    if event.kind == "not_finite":
        return RequestError(f"{event.message}, twice", status=422, code="not_finite", headers=NO_RETRY)
    if event.kind == "elsewhere":
        return RequestError(event.message, status=503, code="failed", retry_after_s=1)
    return RequestError(event.message, status=500, code="failed")
