"""Gives streams to replicas: what is due goes to the one that the routing policy takes. No effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.actions import Action, EndStream, LogLine, Send
from orchestrator.daemon.control.health.blame import Witness
from orchestrator.daemon.control.health.health import HealthBoard
from orchestrator.daemon.control.replicas.fleet import Fleet
from orchestrator.daemon.control.replicas.replicas import Rank, Replica, Replicas
from orchestrator.daemon.control.routing.abilities import needs_ability, refuse_unable
from orchestrator.daemon.control.routing.affinity import block_keys
from orchestrator.daemon.control.routing.route_choice import TRIAL_PATIENCE_S, Exclusions, choose_route, has_hope
from orchestrator.daemon.control.routing.surroundings import Surroundings
from orchestrator.daemon.control.routing.working import WorkingSet
from orchestrator.daemon.control.streams.kv_moves import KvMoves
from orchestrator.daemon.control.streams.overrides import ActiveOverrides, bounds_of, resolve_overrides
from orchestrator.daemon.control.streams.request_history import RouteBook, RouteText
from orchestrator.daemon.control.streams.streams import Sender, Stream, Streams
from orchestrator.errors import RequestError, build_gone_group_error, build_replaced_error
from orchestrator.protocol.commands import Cancel, Submit
from policies.serving.failover.standby import FailoverRules
from policies.serving.fair_order import hold_back
from policies.serving.overrides import EffectiveBound, OperatorBounds
from policies.serving.routing import Route

_NO_RISKS: Mapping[str, str] = {}


class Router:
    """Routes `streams` over `replicas`. Those that are retiring keep the streams that only they can go on with to the
    bit, and take no others. `least_depth`: see ControlLimits."""

    def __init__(
        self,
        replicas: Replicas,
        streams: Streams,
        fleet: Fleet,
        health: HealthBoard,
        least_depth: int = 0,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._replicas = replicas
        self._streams = streams
        self._around = surroundings or Surroundings()
        self.book = RouteBook()
        self._fleet = fleet
        self._exclusions = Exclusions(fleet, streams, health)
        self._working = WorkingSet()
        self._least_depth = least_depth
        self.moves = KvMoves(streams, self._choose_next)

    def set_rules(self, least_depth: int, failover: FailoverRules) -> None:
        """Bound depths of requests that are sent from now on by this, and let other bits go on by that."""
        self._least_depth = least_depth
        self.set_failover(failover)

    def set_failover(self, rules: FailoverRules) -> None:
        self._exclusions.rules = rules
        self._replicas.alike = rules.alike

    def feed(self, now_s: float) -> list[Action]:
        """Send every stream that is due, and those that wait behind others while another replica has a place."""
        streams, fleet = self._streams, self._fleet
        sent = self.moves.advance(now_s) if self.moves.under_way else []
        if not len(streams):
            return sent
        if streams.has_suspects or self._exclusions.reserved:
            sent += self._reserve(now_s)
        if streams.waits:
            sent += self._send_due(now_s)
        fleet.refresh()
        if fleet.waits_beside_places:
            taken = self._take_back_waiting(now_s)
            sent += [*taken, *(self._send_due(now_s) if taken else [])]
        return sent

    def end(self, stream: Stream, now_s: float, error: RequestError | None = None) -> list[Action]:
        """End a live stream: its replica is to forget it, and its reader gets the error, where there is one."""
        outcome = "the client has gone" if error is None else error.code or "error"
        self._streams.drop(stream, outcome, now_s)
        answers: list[Action] = [EndStream(stream.key, error)] if error is not None else []
        return [*self._cancel(stream), *answers]

    def end_all(self, message: str, now_s: float) -> list[Action]:
        error = RequestError(message, status=503, code="interrupted", retry_after_s=10)
        return [action for stream in self._streams.live() for action in self.end(stream, now_s, error)]

    def fail_over(self, stream: Stream, why: str, kind: str, now_s: float) -> None:
        """Let another replica go on with a stream that this one has given up. `kind`: as in ResumedStream."""
        stream.failed_at.append(stream.at)
        self._streams.recall(stream, now_s, f"its worker gave it up: {why}", kind=kind)

    def retire(self, replica: Replica, now_s: float) -> tuple[int, list[Action]]:
        """Take the streams back from a replica that retires, but for those only it can go on with; returns how many."""
        moves = any(
            other.group == replica.group and not self._exclusions.refuses(other, now_s)
            for other in self._replicas.serving
            if other is not replica
        )
        self._keep_unlike(replica)
        taken = [stream for stream in self._streams.at(replica.name) if moves or not stream.group]
        return len(taken), self._take(replica, taken, now_s)

    def _keep_unlike(self, replica: Replica) -> None:
        """Let a retiring replica have the streams without a token whose prompts are of its vocabulary alone."""
        others = [other for other in self._replicas.serving if other is not replica]
        for stream in [*self._streams.at(replica.name), *self._streams.due()]:
            fresh = not stream.group and not stream.committed and stream.submit.vocabulary
            if fresh and fits(stream, replica) and not any(fits(stream, other) for other in others):
                stream.group = replica.group

    def recall_streams(self, replica: Replica, now_s: float) -> list[Witness]:
        """Take all streams back from a replica whose worker is gone; returns those that ran there."""
        ready = replica.state.ready
        places = ready.slots if ready is not None else 0
        return self._streams.recall_replica(
            replica.name,
            places,
            pure=replica.runs == 1,
            progressed=replica.progressed,
            now_s=now_s,
            why=replica.state.detail,
        )

    def bind(self, source: Replica, target: Replica) -> int:
        """Let another replica go on with all that a replica has; returns how many. They go as the first lets go."""
        streams = self._streams.at(source.name)
        for stream in streams:
            stream.bound_to, stream.left = target.name, source.name
        return len(streams)

    def send_back(self, worker: str, now_s: float) -> tuple[int, list[Action]]:
        """Let a replica have the streams again that it gave away by `bind`; returns how many."""
        actions: list[Action] = []
        count = 0
        for replica in self._replicas.with_streams:
            streams = [
                stream for stream in self._streams.at(replica.name) if stream.left == worker and replica.name != worker
            ]
            for stream in streams:
                stream.bound_to, stream.left = worker, ""
            actions += self._take(replica, streams, now_s)
            count += len(streams)
        return count, actions

    def unbind(self, worker: str) -> None:
        for stream in self._streams.live():
            if stream.left == worker:
                stream.bound_to = stream.left = ""

    def is_drained(self, replica: Replica) -> bool:
        if self._streams.counts[replica.name]:
            return False
        if any(other.group == replica.group for other in self._replicas.serving):
            return True
        return not any(stream.group == replica.group and not stream.at for stream in self._streams.live())

    def _send_due(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        due = self._streams.due()
        several = len(self._replicas.serving) > 1
        for stream in due:
            if several and self._streams.is_begun_elsewhere(stream):
                continue  # one request never ends two replicas at once; and its prompt will be in a cache
            if not stream.sends and self._streams.takes_turns and hold_back(*self._fleet.count_places()):
                continue
            prefix = self._prefix(stream)
            routed = self._choose_route(stream, prefix, now_s)
            replica = self._replicas.find_named(routed.replica) if routed.replica is not None else None
            if replica is None:
                self.book.note(stream.key, stream.sends + 1, routed, now_s)
                if (refusal := self.refuse(stream.submit, has_tokens=bool(stream.committed))) is not None:
                    actions += self.end(stream, now_s, refusal)
                    continue
                if self._is_particular(stream):
                    continue
                break  # what those behind it could have, it could have had
            if (replaced := find_other_model(stream, replica)) is not None:
                actions += self.end(stream, now_s, replaced)
                continue
            actions += self._send(stream, replica, prefix, now_s)
            replica.taken_by = routed
            self.book.note(stream.key, stream.sends, routed, now_s)
            if several:
                values = (stream.key, replica.name, RouteText(routed))
                actions.append(LogLine("debug", "request %s goes to %s: %s", values))
        return actions

    def refuse(self, submit: Submit, *, has_tokens: bool = False) -> RequestError | None:
        gone = self._refuse_gone_group(submit)
        if gone is not None or not (self._fleet.has_unable or submit.lora):
            return gone
        return refuse_unable(submit, self._replicas.with_streams, has_tokens=has_tokens)

    def _refuse_gone_group(self, submit: Submit) -> RequestError | None:
        """Return why a request that wants one group's bits cannot have them any more; None where it may."""
        wanted = submit.group
        hopes = (replica for replica in self._replicas.with_streams if has_hope(replica))
        if not wanted or any(replica.group in (wanted, "") for replica in hopes):
            return None
        return build_gone_group_error()

    def _is_particular(self, stream: Stream) -> bool:
        """Return whether a stream can be out where others of the same time are not."""
        own = (
            stream.group
            or stream.submit.group
            or stream.failed_at
            or stream.bound_to
            or self._streams.is_suspect(stream)
            or needs_ability(stream.submit, has_tokens=bool(stream.committed), some_unable=self._fleet.has_unable)
        )
        return bool(own or self.moves.find_pages(stream))

    def _send(self, stream: Stream, replica: Replica, prefix: Sequence[int], now_s: float) -> list[Action]:
        actions: list[Action] = []
        if stream.group and replica.group != stream.group:
            text = "request %s goes on at %s, which is of another group: from its token %d on the bits may differ"
            actions.append(LogLine("warning", text, (stream.key, replica.name, len(stream.committed))))
        if prefix:
            replica.prefixes.note(prefix)
        if not self._streams.counts[replica.name]:
            replica.busy_s = now_s
        if not stream.sends and self._streams.takes_turns:
            stream.held_ms = (now_s - stream.due_s) * MS_PER_S
        replica.runs += 1
        if replica.runs == 1:
            replica.on_change()
        ready = replica.state.ready
        digest = ready.model.digest if ready is not None else ""
        sent = self._streams.send(stream, replica.name, Sender(replica.group, digest), now_s)
        if stream.probation:
            self._exclusions.reserved = ""  # it is tried here, wherever room was made for it
        sent, stream.speculation = resolve_overrides(
            sent, stream.overrides, replica.engine, self._find_bounds(replica, stream.submit)
        )
        sent, moved = self.moves.give(stream, sent, replica, now_s)
        return [*actions, Send(replica.worker, sent), *moved]

    def _find_bounds(self, replica: Replica, submit: Submit) -> OperatorBounds:
        """Return the operator's bounds for a request at a replica, as last reckoned where nothing has changed."""
        standing = replica.standing
        wanted = (replica.state.ready, self._least_depth, submit.variant, bool(submit.prediction))
        known = standing.bounds_for
        if standing.bounds is None or known[0] is not wanted[0] or known[1:] != wanted[1:]:
            ready, least, variant, predicted = wanted
            standing.bounds_for, standing.bounds = wanted, bounds_of(ready, least, variant, predicted=predicted)
        return standing.bounds

    def find_speculation(self, submit: Submit, overrides: ActiveOverrides) -> EffectiveBound | None:
        """See control.port.Control. `overrides`: those that stand now."""
        stream = self._streams.find_live(submit.request_id)
        if stream is not None and stream.at:
            return stream.speculation
        standing = overrides if stream is None else stream.overrides
        bounds = {
            resolve_overrides(submit, standing, replica.engine, self._find_bounds(replica, submit))[1]
            for replica in self._replicas.primary
            if replica.serving
        }
        return bounds.pop() if len(bounds) == 1 else None

    def _take_back_waiting(self, now_s: float) -> list[Action]:
        """Take back streams that wait for a place where another replica would be done sooner now."""
        crowded = self._fleet.take_crowded()
        free = self._fleet.count_free() if crowded else 0
        actions: list[Action] = []
        for replica in crowded if free else []:
            waiting = self._streams.list_behind(replica.name, replica.places)
            able = [stream for stream in waiting if not stream.gained and not self._streams.is_suspect(stream)]
            for stream in able if self._fleet.candidates is None else able[:1]:
                routed = self._choose_route(stream, self._prefix(stream), now_s)
                moves = routed.replica not in (None, replica.name)
                if free and moves and routed.saves(replica.name) > self._around.hysteresis:
                    actions += self._recall(stream, now_s)
                    free -= 1
        return actions

    def _reserve(self, now_s: float) -> list[Action]:
        """Empty the replica with the fewest streams for a suspect that has waited long enough."""
        rules = self._exclusions
        due = self._streams.due() if self._streams.has_suspects else []
        due = [stream for stream in due if self._streams.is_suspect(stream)]
        if not due:
            rules.reserved = ""
            return []
        late = now_s - due[0].due_s >= TRIAL_PATIENCE_S
        able = rules.list_able(due[0], self._replicas.with_streams, now_s) if late or rules.reserved else []
        if any(replica.name == rules.reserved for replica in able):
            return []
        rules.reserved = ""
        if not able or not late:
            return []
        taken = min(able, key=lambda replica: self._streams.counts[replica.name])
        rules.reserved = taken.name
        text = "worker %s is emptied: request %s, which may have ended its worker, is to run there alone"
        line = LogLine("warning", text, (taken.name, due[0].key))
        return [line, *self._take(taken, self._streams.at(taken.name), now_s)]

    def _take(self, replica: Replica, streams: Sequence[Stream], now_s: float) -> list[Action]:
        """Take streams from a replica whose worker still answers: with their KV cache where that is of use."""
        actions: list[Action] = []
        placed = self._streams.at(replica.name)[: replica.places]
        for stream in streams:
            stays, moving = (
                self.moves.want(stream, replica, now_s) if stream.gained or stream in placed else (False, [])
            )
            actions += [*moving, *([] if stays else self._recall(stream, now_s))]
        return actions

    def _choose_next(self, stream: Stream, now_s: float) -> tuple[Replica | None, int]:
        """Return where a stream would go now, and how many of its tokens are remembered there."""
        prefix = self._prefix(stream)
        routed = self._choose_route(stream, prefix, now_s)
        replica = self._replicas.find_named(routed.replica) if routed.replica is not None else None
        return replica, replica.prefixes.count_cached_tokens(prefix) if replica is not None else 0

    def _recall(self, stream: Stream, now_s: float) -> list[Action]:
        cancelled = self._cancel(stream)
        self._streams.recall(stream, now_s)
        return cancelled

    def _cancel(self, stream: Stream) -> list[Action]:
        having = self._replicas.find_named(stream.at) if stream.at else None
        if having is None or having.rank not in (Rank.SERVING, Rank.RETIRING):
            return []
        return [Send(having.worker, Cancel(stream.sent_id))]

    def _choose_route(self, stream: Stream, prefix: Sequence[int], now_s: float) -> Route:
        self._fleet.refresh()
        every, unseen, outs, risks = self._replicas.with_streams, 0, _NO_RISKS, _NO_RISKS
        kept_at = self.moves.find_pages(stream) if self.moves.under_way else ""
        if self._fleet.candidates is not None:
            if not self._exclusions.is_quiet:
                self._fleet.find_unwell(now_s)
            more = [*([kept_at] if kept_at else []), *self._exclusions.list_trying()]
            every, unseen = self._fleet.candidates.choose(stream, prefix, more)
        if self._exclusions.may_find(stream, kept_at):
            outs, risks = self._exclusions.find_exclusions(stream, every, kept_at, now_s)
        paces = self._fleet.paces
        if all(replica.standing.serves for replica in every):
            resting = self._working.find_resting(every, paces, now_s, prefix)
            outs = outs or resting
        chosen = choose_route(stream, prefix, every, self._streams, outs, risks, self._around, now_s, paces)
        if unseen:
            chosen.unseen = unseen
        return chosen

    def _prefix(self, stream: Stream) -> list[int]:
        """Return the keys of the prompt's blocks; none where there is nothing to choose."""
        return block_keys(stream.submit.prompt, stream.submit.lora) if len(self._replicas.serving) > 1 else []


def fits(stream: Stream, replica: Replica) -> bool:
    """Return whether a stream's prompt is of a replica's vocabulary, as far as that is known."""
    ready, wanted = replica.state.ready, stream.submit.vocabulary
    return ready is None or not wanted or wanted == ready.model.vocabulary_fingerprint


def find_other_model(stream: Stream, replica: Replica) -> RequestError | None:
    """Return why a replica cannot go on with a stream, as its model is another one; None where it is not."""
    ready = replica.state.ready
    has_tokens = bool(stream.committed)
    if ready is None:
        return None
    known = stream.model_digest or stream.submit.model_digest
    if fits(stream, replica) and not (has_tokens and known and ready.model.digest and known != ready.model.digest):
        return None
    return build_replaced_error(begun=has_tokens)
