"""What operators ask of streams, workers and drafters while all goes on. No effects.

A failover lasts until it is undone: its worker gives its streams to the other one and takes no new ones. A standby that
it is for is loaded first. While the other one is away, its worker works: no client is refused for a failover. A choice
of drafters belongs to a replica's place, so the next worker there hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.daemon.control import events
from orchestrator.daemon.control.actions import Action, LogLine, Send
from orchestrator.daemon.control.health.blame import NO_RETRY, Blame, refuse
from orchestrator.daemon.control.health.health import HealthBoard, Part
from orchestrator.daemon.control.replicas.replicas import Rank, Replica, Replicas
from orchestrator.daemon.control.replicas.standbys import Standbys
from orchestrator.daemon.control.routing.router import Router
from orchestrator.daemon.control.streams.streams import Streams
from orchestrator.errors import RequestError
from orchestrator.protocol.draft_messages import ChooseDrafters
from policies.serving.failover.health import Health

_CANCELLED = "the operator of this server has cancelled this request"


@dataclass(slots=True)
class _Failover:
    """`under_way`: the other one serves, and streams move. `kept`: an operator keeps work away besides."""

    target: str
    under_way: bool = False
    kept: bool = False


class OperatorSteering:
    def __init__(
        self,
        replicas: Replicas,
        streams: Streams,
        router: Router,
        health: HealthBoard,
        standbys: Standbys,
        blame: Blame,
    ) -> None:
        self._replicas = replicas
        self._streams = streams
        self._router = router
        self._health = health
        self._standbys = standbys
        self._blame = blame
        self._failovers: dict[str, _Failover] = {}  # by the worker that gives its streams away
        self.chosen: dict[int, tuple[str, ...]] = {}  # drafters, by the replica's number

    def fold(self, event: events.SteeringEvent, now_s: float) -> list[Action]:
        match event:
            case events.RequestCancelled():
                return self._cancel(event, now_s)
            case events.FailoverAsked():
                return self._fail_over(event, now_s)
            case events.FailoverUndone():
                return self._give_back(event.source, now_s)
            case events.DraftersChosen():
                return self._choose(event)
            case events.RequestQuarantined():
                return self._quarantine(event, now_s)

    def advance(self, now_s: float) -> list[Action]:
        """Begin the failovers whose other side serves by now, and let workers work whose other side is away. What was
        asked of workers that are gone is over: a later worker of the same name has nothing to do with it."""
        self._forget_gone()
        actions: list[Action] = []
        for source, failover in self._failovers.items():
            target, giver = self._find(failover.target), self._find(source)
            serves = target is not None and target.rank is Rank.SERVING and target.serving
            if failover.under_way and not serves and not failover.kept:
                failover.under_way = False
                self._health.hold(Part("worker", source), None)
                self._router.unbind(source)
                text = "worker %s takes work again, as %s is away"
                actions.append(LogLine("warning", text, (source, failover.target)))
            if failover.under_way or giver is None or target is None or not serves:
                continue
            failover.under_way = True
            count = self._router.bind(giver, target)
            self._health.hold(Part("worker", source), Health.DRAINING)
            text = "worker %s is failed over to %s, as an operator wants it: %d streams"
            actions.append(LogLine("warning", text, (source, failover.target, count)))
            actions += self._router.retire(giver, now_s)[1]
        return actions

    @property
    def has_failovers(self) -> bool:
        return bool(self._failovers)

    def list_failovers(self) -> dict[str, str]:
        return {source: failover.target for source, failover in self._failovers.items()}

    def observe_ready(self, replica: Replica, drafters: Sequence[str]) -> list[Action]:
        """Tell a worker that just got drafters which are chosen. A choice of one that is gone is over."""
        names = self.chosen.get(replica.engine)
        if names is None:
            return []
        if not set(names) <= set(drafters):
            del self.chosen[replica.engine]
            line = LogLine("warning", "the choice of drafters of worker %s is over: one is gone", (replica.name,))
            return [line, Send(replica.worker, ChooseDrafters(None))]
        return [Send(replica.worker, ChooseDrafters(list(names)))]

    def observe_hold(self, part: Part) -> None:
        """An operator keeps work away from a part: a failover from there leaves that as it is."""
        if part.kind == "worker" and (failover := self._failovers.get(part.name)) is not None:
            failover.kept = True

    def observe_release(self, part: Part) -> None:
        """An operator lets a part work again: where that was failed over, its streams may go where they like."""
        if part.kind == "worker" and (undone := self._failovers.pop(part.name, None)) is not None:
            self._router.unbind(part.name)
            self._call(undone.target, called=False)

    def _forget_gone(self) -> None:
        held = [*self._health.list_held(Health.DRAINING), *self._health.list_held(Health.CORDONED)]
        if not held and not self._failovers:
            return
        standbys = set(self._standbys.list_names())
        for part in {*held, *(Part("worker", name) for name in self._failovers)}:
            gone = self._replicas.find_named(part.name) is None and part.name not in standbys
            if part.kind == "worker" and gone:
                self._health.hold(part, None)
                self.observe_release(part)

    def _cancel(self, event: events.RequestCancelled, now_s: float) -> list[Action]:
        error = RequestError(_CANCELLED, status=409, code="request_cancelled", headers=NO_RETRY)
        streams = [stream for key in event.streams if (stream := self._streams.find_live(key)) is not None]
        lines: list[Action] = [
            LogLine("info", "request %s is cancelled, as an operator wants it", (stream.key,)) for stream in streams
        ]
        return lines + [action for stream in streams for action in self._router.end(stream, now_s, error)]

    def _fail_over(self, event: events.FailoverAsked, now_s: float) -> list[Action]:
        if event.target in self._failovers:  # the other way round: that one serves again
            undone = self._failovers.pop(event.target)
            self._health.hold(Part("worker", event.target), None)
            self._call(undone.target, called=False)
        known = self._failovers.get(event.source)
        kept = known.kept if known is not None else self._health.judge((), now_s, event.source).held
        self._failovers[event.source] = _Failover(event.target, kept=kept)
        if known is not None and known.target != event.target:
            self._call(known.target, called=False)
        self._call(event.target, called=True)
        text = "worker %s is to be failed over to %s"
        return [LogLine("info", text, (event.source, event.target)), *self.advance(now_s)]

    def _give_back(self, source: str, now_s: float) -> list[Action]:
        undone = self._failovers.pop(source, None)
        self._health.hold(Part("worker", source), None)
        if undone is not None:
            self._call(undone.target, called=False)
        count, actions = self._router.send_back(source, now_s)
        return [LogLine("info", "worker %s has its place again: %d streams go back", (source, count)), *actions]

    def _call(self, name: str, *, called: bool) -> None:
        if called or name not in [failover.target for failover in self._failovers.values()]:
            self._standbys.call(name, called=called)

    def _choose(self, event: events.DraftersChosen) -> list[Action]:
        actions: list[Action] = []
        chosen = "as configured" if event.names is None else ", ".join(event.names) or "none"
        names = None if event.names is None else list(event.names)
        for replica in self._replicas.list_ranked(*Rank):
            if replica.engine not in event.engines:
                continue
            actions.append(LogLine("info", "drafters of worker %s: %s", (replica.name, chosen)))
            if replica.state.ready is not None and replica.life.running:
                actions.append(Send(replica.worker, ChooseDrafters(names)))
        for engine in event.engines:
            if event.names is None:
                self.chosen.pop(engine, None)
            else:
                self.chosen[engine] = event.names
        return actions

    def _quarantine(self, event: events.RequestQuarantined, now_s: float) -> list[Action]:
        wanted = (event.digest, event.request_id, event.prompt_tokens)
        quarantined = self._blame.quarantine(*wanted, now_s=now_s, until_s=event.until_s)
        error = refuse(quarantined, now_s)
        live = [stream for stream in self._streams.live() if stream.digest == event.digest]
        line = LogLine("warning", "requests like %s are refused, as an operator wants it", (event.request_id,))
        return [line, *(action for stream in live for action in self._router.end(stream, now_s, error))]

    def _find(self, name: str) -> Replica | None:
        standby = self._standbys.find_replica(name)
        if standby is not None:
            return standby
        replica = self._replicas.find_named(name)
        return replica if replica is not None and replica.rank in (Rank.SERVING, Rank.RETIRING) else None
