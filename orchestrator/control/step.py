"""Control's decisions: one event folded into the state, then a chain of rules. No effects, no clock, no I/O.

Only `step` changes a State. It returns actions in order (control.actions), and control.controller carries them out.
After every event the same rules look at the state: a rollout advances where it can, and streams that are due are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from orchestrator.control.actions import (
    Action,
    EndStream,
    LogLine,
    Notify,
    Settle,
    TellGauges,
    TellHealth,
    TellLoads,
    WakeAfter,
)
from orchestrator.control.blame import NO_RETRY, Blame, refuse
from orchestrator.control.draft_workers import NO_POOLS, DraftWorkers
from orchestrator.control.events import (
    ClusterFailed,
    ClusterOpened,
    ControlClosed,
    ControlEvent,
    DrainBegun,
    DrainOver,
    LoadObserved,
    OtherEvent,
    PartHeld,
    QuarantineReleased,
    RetuneAsked,
    RolloutAsked,
    RolloutDropped,
    RulesChanged,
    SteeringEvent,
    StreamClosed,
    StreamOpened,
    Woke,
    WorkerEnded,
    WorkerEnding,
    WorkerSaid,
    WorkersChosen,
    WorkersHeard,
    WorkerStarted,
)
from orchestrator.control.health import HealthBoard, Part, PartHealth
from orchestrator.control.loads import name_device
from orchestrator.control.replicas import ALIKE, Rank, Replica, Replicas, compare
from orchestrator.control.retune import Retuning
from orchestrator.control.rollout import Rollout
from orchestrator.control.router import Router
from orchestrator.control.standbys import Standbys
from orchestrator.control.state import FAILED, STARTING
from orchestrator.control.steering import OperatorSteering
from orchestrator.control.streams import Stream, Streams
from orchestrator.control.surroundings import Surroundings
from orchestrator.control.watch import Watch, Watched
from orchestrator.control.worker_life import NO_DEATH, WorkerLives
from orchestrator.errors import RequestError
from orchestrator.workers.draft_messages import DraftLink
from orchestrator.workers.messages import (
    Failed,
    Gauges,
    MovedIn,
    MovedOut,
    PagesDoor,
    Progress,
    Ready,
    Refused,
    Retuned,
    RoundReport,
)
from policies.serving.draft_pool import PoolSize
from policies.serving.failover.blame import LossKind
from policies.serving.failover.health import Health

_MOST_UNTOLD = 4096
_WATCHED = (Rank.STANDBY, Rank.JOINING, Rank.SERVING, Rank.RETIRING)
_HOST_TRIES = 2  # of a replica that is joining: nobody waits for a host that is not there
_SHUTTING_DOWN = "the server is shutting down; send the request again"


class State:
    """All that control knows. Whoever reads it changes nothing."""

    def __init__(
        self,
        max_restarts: int,
        least_depth: int = 0,
        quarantine_s: float = 0.0,
        surroundings: Surroundings | None = None,
        draft_pools: Mapping[str, PoolSize] = NO_POOLS,
    ) -> None:
        lives = WorkerLives(max_restarts)
        self.blame = Blame(quarantine_s)
        self.watch = Watch()
        self.streams = Streams(self.blame)
        self.replicas = Replicas(lives)
        self.drafts = DraftWorkers(lives, draft_pools)
        self.health = HealthBoard()
        self.around = surroundings or Surroundings()
        self.around.list_drafts = self.drafts.list_specs
        self.loads = self.around.loads
        self.router = Router(self.replicas, self.streams, self.health, least_depth, self.around)
        self.rollout = Rollout(self.replicas, self.router, self.drafts)
        self.retuning = Retuning()
        self.standbys = Standbys(self.replicas, self.router, self.drafts, self.health)
        self.steering = OperatorSteering(
            self.replicas, self.streams, self.router, self.health, self.standbys, self.blame
        )
        self.draining = False
        self.given_up = False
        self.unwell: dict[Part, PartHealth] = {}
        self.losses: Counter[tuple[int, LossKind]] = Counter()

    def list_parts(self) -> set[Part]:
        """Return every part that a worker is, or is to be, on, and those that an operator holds."""
        replicas = [*self.replicas.with_streams, *self.standbys.list_idle()]
        found = {part for replica in replicas for part in replica.parts}
        held = [*self.health.list_held(Health.DRAINING), *self.health.list_held(Health.CORDONED)]
        return found.union((Part("worker", replica.name) for replica in replicas), held)

    def list_watched(self) -> list[Watched]:
        """Return the workers that have something to do, and since when."""
        replicas = self.replicas.list_ranked(*_WATCHED)
        loading = [replica.life for replica in replicas if not replica.state.serving] + self.drafts.list_loading()
        return [Watched(life, loading=True) for life in loading if life.running] + [
            Watched(replica.life, loading=False, since_s=replica.busy_s)
            for replica in replicas
            if replica.serving and self.streams.counts[replica.name]
        ]


def step(state: State, event: ControlEvent, now_s: float) -> list[Action]:
    """Fold an event into the state; returns what is to be done, in order. Observers come last: what they ask for then
    follows all of that. Raises RequestError where a stream cannot be opened; nothing has changed then."""
    actions = state.steering.fold(event, now_s) if isinstance(event, SteeringEvent) else _fold(state, event, now_s)
    actions += state.loads.forget_stale(now_s)
    actions += state.rollout.advance(now_s)
    actions += state.retuning.advance()
    actions += state.standbys.advance(now_s)
    actions += state.steering.advance(now_s)
    actions += state.drafts.advance(now_s)
    actions += _give_up_if_hopeless(state, now_s)
    actions += _watch_health(state, now_s)
    if not state.replicas.closed:
        actions += state.router.feed(now_s)
        look_s = state.watch.schedule_look(state.list_watched(), now_s)
        actions += [WakeAfter(look_s)] if look_s is not None else []
    return sorted(actions, key=lambda action: isinstance(action, Notify | TellLoads))


def _fold(state: State, event: OtherEvent, now_s: float) -> list[Action]:
    match event:
        case WorkerStarted() | WorkerSaid() | WorkerEnding() | WorkerEnded():
            replica = state.replicas.find(event.worker)
            if replica is None and (preparing := state.standbys.find_preparing(event.worker)) is not None:
                return state.standbys.observe_preparing(preparing, event, now_s)
            if replica is None:
                return state.drafts.observe(event, now_s)
            return _fold_worker_event(state, replica, event, now_s)
        case StreamOpened():
            state.streams.open(event.submit, event.overrides, now_s)
            return []
        case StreamClosed():
            stream = state.streams.find(event.stream)
            return state.router.end(stream, now_s) if stream is not None else []
        case RolloutAsked() | RolloutDropped() | RetuneAsked() | RulesChanged():
            return _fold_change(state, event, now_s)
        case QuarantineReleased():
            state.blame.release(event.digests)
            return []
        case LoadObserved():
            return _fold_loads(state, event, now_s)
        case WorkersHeard():
            return _hear_workers(state, event, now_s)
        case Woke():
            return _end_hung(state, now_s)
        case PartHeld():
            return _hold_part(state, event.part, event.state)
        case _:
            return _fold_phase(state, event, now_s)


def _fold_change(
    state: State, event: RolloutAsked | RolloutDropped | RetuneAsked | RulesChanged, now_s: float
) -> list[Action]:
    """Other workers, other options of theirs, or other rules are wanted."""
    match event:
        case RolloutAsked():
            chosen = (
                [] if event.standbys is None else state.standbys.choose(event.standbys, state.standbys.rules, now_s)
            )
            if event.draft_pools is not None:
                state.drafts.set_sizes(event.draft_pools)
            return [*chosen, *state.rollout.ask(event.targets, event.drafts)]
        case RetuneAsked():
            return _ask_retune(state, event, now_s)
        case RulesChanged():
            return _change_rules(state, event)
        case RolloutDropped():
            return state.rollout.drop()


def _ask_retune(state: State, event: RetuneAsked, now_s: float) -> list[Action]:
    """Let replicas decode by other options, and have the draft workers and the standbys that go with these."""
    state.drafts.set_sizes(event.draft_pools)
    replicas = [one for one in state.replicas.primary if not one.standby]
    asked = state.retuning.ask(replicas, event.targets)
    chosen = state.standbys.choose(event.standbys, state.standbys.rules, now_s)
    return [*asked, *chosen, *state.drafts.run_these(event.drafts)]


def _change_rules(state: State, event: RulesChanged) -> list[Action]:
    state.around.take_figures(event.surroundings)
    state.blame.quarantine_s = event.quarantine_s
    state.standbys.rules = event.failover
    state.router.set_rules(event.least_depth, event.failover.other_bits)
    return []


def _fold_phase(
    state: State,
    event: WorkersChosen | ClusterOpened | ClusterFailed | DrainBegun | DrainOver | ControlClosed,
    now_s: float,
) -> list[Action]:
    """From nothing to serving, and from there to the end."""
    live = len(state.streams)
    match event:
        case WorkersChosen():
            for engine, spec in enumerate(event.targets):
                state.replicas.create(spec, engine, Rank.SERVING)
            state.router.other_bits = event.failover.other_bits
            return [
                *state.standbys.choose(event.standbys, event.failover, now_s),
                *state.drafts.run_these(event.drafts),
            ]
        case ClusterOpened():
            return [action for replica in state.replicas.serving for action in replica.life.begin()]
        case ClusterFailed():
            for replica in state.replicas.serving:
                replica.state.mark_failed(event.cause)
            return state.standbys.choose((), state.standbys.rules, now_s)
        case DrainBegun():
            state.draining = True
            text = "draining: %d streams are being finished, for %g s at most"
            return [LogLine("info", text, (live, event.timeout_s))]
        case DrainOver():
            line = LogLine("warning", "drain timed out after %g s: %d streams are cut off", (event.timeout_s, live))
            return [*([line] if live else []), *_end_streams(state, _SHUTTING_DOWN, now_s)]
        case ControlClosed():
            state.draining = True
            closed = [*state.standbys.close(), *state.drafts.close(), *state.replicas.close()]
            return [*_end_streams(state, _SHUTTING_DOWN, now_s), *closed]


def _fold_worker_event(
    state: State, replica: Replica, event: WorkerStarted | WorkerSaid | WorkerEnding | WorkerEnded, now_s: float
) -> list[Action]:
    match event:
        case WorkerStarted():
            replica.observe_start(event.where, now_s)
            return replica.life.observe_start(event.where, now_s)
        case WorkerSaid():
            if not replica.life.running:  # it is being ended: whatever it had is somebody else's
                return replica.life.observe(event.event, now_s)
            replica.observe(event.event)
            if isinstance(event.event, RoundReport):
                _learn_round(state, replica, event.event)
            said = event.event
            chosen = state.steering.observe_ready(replica, said.drafters) if isinstance(said, Ready) else []
            return [*replica.life.observe(event.event, now_s), *_fold_said(state, replica, event, now_s), *chosen]
        case WorkerEnding():
            replica.life.observe_ending()
            return _lose_worker(state, replica, event.cause, event.kind, now_s)
        case WorkerEnded():
            return _replace_worker(state, replica, event.cause, event.kind, now_s)


def _learn_round(state: State, replica: Replica, done: RoundReport) -> None:
    """Learn from a round: at once, or with the next sample, where the device is sampled. That says how much of the
    device the round had."""
    state.loads.observe_round(replica.spec, done.device_ms)
    if state.loads.find(replica.spec) is None or len(replica.untold) >= _MOST_UNTOLD:
        replica.learn(1.0)


def _fold_loads(state: State, event: LoadObserved, now_s: float) -> list[Action]:
    """Take samples of devices in, and learn from the rounds that ran meanwhile."""
    replicas = state.replicas.list_ranked(*_WATCHED)
    queues: Counter[str] = Counter()
    for replica in replicas:
        queues[name_device(replica.spec)] += max(0, state.streams.counts[replica.name] - replica.places)
    told = state.loads.observe(event.samples, queues, now_s)
    for replica in replicas:
        if name_device(replica.spec) in event.samples:
            replica.learn(state.loads.explain_last_rounds(replica.spec))
    return [*told, TellLoads(event.samples, state.loads.list_loads(event.samples))]


def _fold_said(state: State, replica: Replica, said: WorkerSaid, now_s: float) -> list[Action]:
    """Fold an event of a replica's worker. Of one that is joining or leaving nobody waits for anything."""
    event = said.event
    if isinstance(event, PagesDoor):
        state.router.moves.doors[replica.worker] = event.door
        return []
    if replica.rank in (Rank.JOINING, Rank.LEAVING, Rank.STANDBY):
        replica.state.observe(event)
        return state.standbys.observe_ready(replica) if isinstance(event, Ready) else []
    if isinstance(event, RoundReport):
        return _fold_round(state, replica, event, now_s)
    if isinstance(event, Ready):
        return _fold_ready(state, replica, event, now_s)
    before = replica.state.gauges
    replica.state.observe(event)
    match event:
        case Gauges():
            return [TellGauges(replica.name, before, event)]
        case Progress():
            return [Notify(event)]
        case Retuned():
            return _fold_retuned(state, replica, event)
        case MovedOut():
            return state.router.moves.observe_out(event, now_s)
        case MovedIn():
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
    """End a stream that its worker does not go on with, but try once more where it computed no finite number."""
    if refused.kind == "not_finite" and not stream.failed_at:
        text = "request %s is tried again: worker %s computed no finite number for it"
        line = LogLine("warning", text, (stream.key, replica.name))
        state.router.fail_over(stream, now_s)
        return [line]
    state.streams.drop(stream, refused.kind, now_s)
    return [EndStream(stream.key, _build_refusal(refused))]


def _fold_round(state: State, replica: Replica, done: RoundReport, now_s: float) -> list[Action]:
    """Deliver a round's tokens, and count it."""
    if replica.engine:
        deltas = [msgspec.structs.replace(delta, engine=replica.engine) for delta in done.deltas]
        done = msgspec.structs.replace(done, deltas=deltas, engine=replica.engine)
    state.health.observe_round(replica.name, replica.parts, done, now_s)
    told = [one for delta in done.deltas if (one := state.streams.deliver(delta, now_s)) is not None]
    delivered = sum(len(one.delta.tokens) for one in told)
    for one in told:
        if one.delta.tokens:
            replica.observe_progress(one.stream)
    state.replicas.count_for_successor(replica, done, delivered)
    replica.state.observe(done, delivered)
    return [*told, *state.streams.take_resumed(), Notify(done)]


def _fold_ready(state: State, replica: Replica, ready: Ready, now_s: float) -> list[Action]:
    """Let a worker serve, unless its tokens would differ from those that streams have."""
    actions: list[Action] = []
    if replica.rank is Rank.SERVING and replica.state.ready is None and not replica.standby:
        why, actions = compare(replica, ready, state.replicas.primary)
        if why:
            alike = f"its tokens would differ from the other replicas'; {ALIKE}"
            refused = Failed(f"{replica.name} serves with {why}: {alike}", restartable=False)
            return actions + replica.life.end(refused)
    again = " again" if replica.state.phase != STARTING else ""
    replica.life.served = True
    replica.state.start_s = now_s - replica.state.due_s
    replica.state.observe(ready)
    held = len(state.streams) - state.streams.counts.total()
    streams = f", {held} held stream{'s' * (held > 1)} can go on" if held else ""
    values = (replica.name, again, replica.state.where, streams)
    actions += [Settle(), LogLine("info", "worker %s ready%s: %s%s", values)]
    if replica.rank is Rank.SERVING:
        actions += state.drafts.target_ready(replica.name, replica.worker, ready)
    return actions


def _fold_retuned(state: State, replica: Replica, answer: Retuned) -> list[Action]:
    """A worker decodes by other options: draft workers are attached again, since it has other drafters."""
    told = state.retuning.observe(replica, answer)
    if answer.ready is None:
        return told
    replica.state.ready = answer.ready
    chosen = state.steering.observe_ready(replica, answer.ready.drafters)
    return [*told, *state.drafts.target_ready(replica.name, replica.worker, answer.ready), *chosen]


def _lose_worker(state: State, replica: Replica, cause: str, kind: LossKind, now_s: float) -> list[Action]:
    """A replica's worker is of no use any more, whatever is left of its process: its streams are due again."""
    if replica.death is not None:
        return []
    replica.death = state.blame.number_death()
    state.retuning.forget(replica.worker)
    cause, kind = replica.life.explain(cause, kind)
    replica.state.mark_worker_lost(cause)
    state.drafts.forget_links(replica.name)
    if not state.replicas.closed:
        state.health.observe_loss(replica.name, replica.parts, kind, replica.life.failure_kind, cause, now_s)
        state.standbys.observe_lost(replica)
    if state.replicas.closed or replica.rank not in (Rank.SERVING, Rank.RETIRING):
        return []
    state.losses[replica.engine, kind] += 1
    seen = state.router.recall_streams(replica, now_s)
    convicted = state.blame.observe_death(replica.death, kind, cause, seen, now_s)
    if convicted is None:
        return []
    text = "request %s is refused from now on: it ended %d workers, alone in the last; %s"
    actions: list[Action] = [LogLine("error", text, (convicted.request_id, convicted.deaths, cause))]
    error = refuse(convicted, now_s)
    guilty = [stream for stream in state.streams.live() if stream.digest == convicted.digest]
    return actions + [action for stream in guilty for action in state.router.end(stream, now_s, error)]


def _replace_worker(state: State, replica: Replica, cause: str, kind: LossKind, now_s: float) -> list[Action]:
    """A replica's worker is gone: another follows, or none can."""
    actions = _lose_worker(state, replica, cause, kind, now_s)
    number = replica.death if replica.death is not None else NO_DEATH
    hopeless = replica.rank is Rank.JOINING or not any(one.life.served for one in state.replicas.with_streams)
    explained = state.blame.explained
    wait_s = state.health.wait_s(replica.parts, now_s)
    state.router.moves.doors.pop(replica.worker, None)
    loss = replica.life.observe_end(
        *(cause, kind, now_s), number=number, explained=explained, hopeless=hopeless, wait_s=wait_s
    )
    if loss.restart:
        replica.state.mark_restarting(loss.restart, now_s + loss.after_s, spent=loss.spent)
    actions += loss.actions
    if replica.rank is Rank.JOINING and replica.life.budget.count("host") >= _HOST_TRIES:
        replica.state.mark_failed(cause)
    if loss.spent and replica.rank is Rank.SERVING:
        actions += state.drafts.detach_target(replica.name)
    if loss.failure:
        replica.state.mark_failed(loss.failure)
        actions.append(LogLine("error", "worker %s failed: %s", (replica.name, loss.failure)))
        if replica.rank is Rank.SERVING:
            actions += state.drafts.detach_target(replica.name)
    state.replicas.forget_ended(replica)
    return actions


def _hear_workers(state: State, event: WorkersHeard, now_s: float) -> list[Action]:
    for number in event.workers:
        if (replica := state.replicas.find(number)) is not None:
            replica.life.heard_s = now_s
    for life in state.drafts.list_loading():
        if life.number in event.workers:
            life.heard_s = now_s
    return []


def _end_hung(state: State, now_s: float) -> list[Action]:
    """End workers that hang; their streams go on elsewhere at once."""
    actions: list[Action] = []
    for life, why in state.watch.find_hung(state.list_watched(), now_s):
        actions.append(LogLine("error", "%s hangs: %s; it is ended", (life.title, why)))
        actions += life.end(Failed(f"it hung: {why}", restartable=True, kind="hung"))
        if (replica := state.replicas.find(life.number)) is not None:
            actions += _lose_worker(state, replica, why, "hung", now_s)
    return actions


def _hold_part(state: State, part: Part, held: Health | None) -> list[Action]:
    """Keep work away from a part, as an operator asks, or let it work again."""
    state.health.hold(part, held)
    if held is None:
        state.steering.observe_release(part)
    return [LogLine("info", "%s: %s", (part, held.value if held is not None else "may work again"))]


def _watch_health(state: State, now_s: float) -> list[Action]:
    """Move what can move away from parts that drain, cordon what has drained, and tell whoever plans when the health of
    a part has changed."""
    actions: list[Action] = []
    for part in state.health.list_held(Health.DRAINING):
        on_it = [one for one in state.replicas.with_streams if part in (*one.parts, Part("worker", one.name))]
        for replica in on_it if not state.replicas.closed else []:
            actions += state.router.retire(replica, now_s)[1]
        if not any(state.streams.counts[one.name] for one in on_it):
            state.health.hold(part, Health.CORDONED)
    known, state.unwell = state.unwell, state.health.weigh_parts(now_s)
    shares = {part: one.share for part, one in state.unwell.items()}
    if shares == {part: one.share for part, one in known.items()}:
        return actions
    refusing = [part for part, share in shares.items() if not share]
    fresh = [part for part in refusing if part not in known or known[part].share]
    lines = [LogLine("warning", "%s: it takes nothing new", (state.unwell[part].why,)) for part in fresh]
    waits = [wait_s for part in refusing if (wait_s := state.health.wait_s([part], now_s))]
    return [*actions, *lines, TellHealth(state.unwell), *(WakeAfter(wait_s) for wait_s in waits)]


def _give_up_if_hopeless(state: State, now_s: float) -> list[Action]:
    """Give up, once, where all replicas have failed and no standby can take their place."""
    serving = state.replicas.serving
    hopeless = bool(serving) and all(one.state.phase == FAILED for one in serving) and not state.standbys.can_help
    if hopeless is state.given_up:
        return []
    state.given_up = hopeless
    return _give_up(state, serving[0].state.detail, now_s) if hopeless else []


def _give_up(state: State, cause: str, now_s: float) -> list[Action]:
    """No replica will ever serve."""
    return [Settle(), *_end_streams(state, f"the model has failed: {cause}", now_s), *state.drafts.close()]


def _end_streams(state: State, message: str, now_s: float) -> list[Action]:
    error = RequestError(message, status=503, kind="server_error", code="interrupted", retry_after_s=10)
    return [action for stream in state.streams.live() for action in state.router.end(stream, now_s, error)]


def _build_refusal(event: Refused) -> RequestError:
    if event.kind == "invalid":
        return RequestError(event.message, status=400)
    if event.kind == "not_finite":
        return RequestError(f"{event.message}, twice", status=422, code="not_finite", headers=NO_RETRY)
    return RequestError(event.message, status=500, kind="server_error", code="failed")
