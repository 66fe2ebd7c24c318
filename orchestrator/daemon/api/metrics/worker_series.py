"""Metrics of rounds, and of what workers say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.daemon.api.metrics.canary_series import TOKEN_S
from orchestrator.daemon.api.metrics.request_timing import WINDOW_S, Recent
from orchestrator.daemon.api.metrics.series import Engine, PerWorker, Present, Registered
from orchestrator.daemon.control.port import DraftView, KvMoveTotals, ReplicaView
from orchestrator.protocol.draft_messages import DrafterState, RemoteState
from orchestrator.protocol.rounds import Gauges, RoundReport
from policies.serving.failover.blame import LossKind

TOKEN_COUNTS = tuple(float(2**power) for power in range(18))
"""Bounds of histograms of tokens."""
# Upper ends of a histogram's buckets, part of the metrics' language.
_ROUND_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)

_FLIGHTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # as above


_WORKER_COUNTS = {
    "preemptions": ("num_preemptions", "Requests sent back to the queue."),
    "out_of_memory": ("out_of_memory_forwards", "Forwards that ran out of memory."),
    "not_finite": ("not_finite_requests", "Requests that ended for their logits."),
    "tolerance_recalibrations": ("tolerance_recalibrations", "Tolerances learned anew as acceptance had drifted."),
    "prefix_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "prefix_loaded": ("prefix_cache_loaded", "Those of them that were read from disk."),
}
"""Counts among `Gauges`, by the field."""
_REMOTE_COUNTS = {
    "asks": ("drafter_asks", "Rounds that asked it for drafts."),
    "late": ("drafter_late_answers", "Answers after the round had gone on."),
    "connections": ("drafter_connections", "Times it was connected."),
    "ahead_hits": ("drafter_ahead_hits", "Drafts there before they were asked for."),
    "ahead_misses": ("drafter_ahead_misses", "Drafts that were not there yet."),
    "sent_bytes": ("drafter_link_sent_bytes", "Bytes sent to it over its link."),
    "received_bytes": ("drafter_link_received_bytes", "Bytes that came from it over its link."),
}
"""Counts of `RemoteState`, by the field."""


class RoundSeries:
    """What rounds of the decode loop add up to."""

    def __init__(self, make: Registered, clock: Clock) -> None:
        self._clock = clock
        self._recent: dict[tuple[str, str], Recent] = {}
        self._drafts = make.counter("spec_decode_num_drafts", "Drafts verified, one a sequence and round.")
        self._drafted = make.counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = make.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._positions = make.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a position.", "position"
        )
        self._rule_drafted = make.counter("acceptance_draft_tokens", "Draft tokens verified under a rule.", "rule")
        self._rule_accepted = make.counter("acceptance_accepted_tokens", "Draft tokens a rule accepted.", "rule")
        self._tolerated = make.counter("tolerated_tokens", "Tokens of output that only the tolerance accepted.")
        self._prompt = make.counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generated = make.counter("generation_tokens", "Tokens generated.")
        self._iteration = make.histogram("iteration_tokens_total", "Tokens of a round, prompts included.", TOKEN_COUNTS)
        self._round = make.histogram("round_seconds", "Time of a round.", TOKEN_S)
        self._draft_ms = make.histogram("draft_latency_ms", "Drafting in a round that had a draft.", _ROUND_MS)
        self._verify_ms = make.histogram("verifier_latency_ms", "The target's forward in a round.", _ROUND_MS)
        self._stages_s = make.counter("target_stage_seconds", "Time that a stage of a sharded target worked.", "stage")
        self._in_flight = make.histogram("rounds_in_flight", "Rounds of a sharded target under way.", _FLIGHTS)
        self._rate = Present(make.gauge("acceptance_rate", f"Accepted by drafted tokens, last {WINDOW_S:g} s."))
        self._speed = Present(make.gauge("tokens_per_second", f"Tokens generated a second, last {WINDOW_S:g} s."))

    def observe(self, of: Engine, done: RoundReport) -> None:
        """Count a round."""
        generated = sum(len(delta.tokens) for delta in done.deltas)
        # A request's first delta is the one that makes all that was ever generated; a resumed one has more behind it.
        prompts = sum(
            delta.stats.prompt_tokens
            for delta in done.deltas
            if delta.stats is not None and delta.tokens and delta.stats.generated == len(delta.tokens)
        )
        self._drafts.labels(*of).inc(done.drafts)
        self._drafted.labels(*of).inc(done.drafted)
        self._accepted.labels(*of).inc(done.accepted)
        for position, count in enumerate(done.accepted_per_position):
            self._positions.labels(*of, str(position)).inc(count)
        for rule, (drafted, accepted) in done.by_rule.items():
            self._rule_drafted.labels(*of, rule).inc(drafted)
            self._rule_accepted.labels(*of, rule).inc(accepted)
        self._tolerated.labels(*of).inc(done.tolerated)
        self._prompt.labels(*of).inc(prompts)
        self._generated.labels(*of).inc(generated)
        self._iteration.labels(*of).observe(generated + prompts)
        self._round.labels(*of).observe(done.round_ms / 1000.0)
        self._verify_ms.labels(*of).observe(done.device_ms)
        for stage, worked_ms in enumerate(done.stage_ms):
            self._stages_s.labels(*of, str(stage)).inc(worked_ms / 1000.0)
        if done.stage_ms:
            self._in_flight.labels(*of).observe(done.in_flight)
        if done.drafts:
            self._draft_ms.labels(*of).observe(done.draft_ms)
        self._recent.setdefault(of, Recent(WINDOW_S)).add(
            self._clock.monotonic_s(), done.drafted, done.accepted, generated
        )

    def refresh(self, engines: Sequence[Engine]) -> None:
        """Set what looks back to how it is now."""
        now_s = self._clock.monotonic_s()
        recent = {of: self._recent.setdefault(of, Recent(WINDOW_S)) for of in engines}
        self._speed.show({of: sums.rate(now_s, 2) for of, sums in recent.items()})
        # Where nothing was drafted there is no rate, and the last one would be a lie.
        drafted = {of: sums.sum(now_s, 0) for of, sums in recent.items()}
        self._rate.show({of: recent[of].sum(now_s, 1) / count for of, count in drafted.items() if count})


class WorkerSeries:
    """What workers say of themselves."""

    def __init__(self, make: Registered) -> None:
        self._running = Present(make.gauge("num_requests_running", "Requests in the decode loop."))
        self._waiting = Present(make.gauge("num_requests_waiting", "Requests that wait for a place."))
        self._kv_usage = Present(make.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."))
        self._counts = {field: PerWorker(make.counter(*about)) for field, about in _WORKER_COUNTS.items()}
        self._low = make.gauge(
            "low_acceptance", "Classes of requests whose drafts are accepted too rarely.", "drafter", "cause"
        )
        self._delta = make.gauge("tolerance_delta", "Nats that tolerance allows, once it is known.", "sampling")
        self._restarts = make.counter("worker_restarts", "Restarts of the worker since the daemon started.")
        self._restarts_counted: dict[Engine, int] = {}
        self._losses = make.counter("worker_losses", "Workers that were lost, by how.", "kind")
        self._losses_counted: dict[tuple[int, LossKind], int] = {}
        self._moves = make.counter("kv_moves", "Streams that were moved by plan, by what became of their KV.", "how")
        self._moved_bytes = make.counter("kv_moved_bytes", "Pages of KV caches that went along with streams.")
        self._moving_s = make.counter("kv_move_seconds", "Time that streams stood still while their KV went along.")
        self._moves_counted: dict[int, KvMoveTotals] = {}

    def count(self, of: Engine, pid: int, gauges: Gauges) -> None:
        """Take what the worker with this pid has counted so far."""
        for field, count in self._counts.items():
            count.update(pid, getattr(gauges, field), *of)

    def count_losses(self, model: str, losses: Mapping[tuple[int, LossKind], int]) -> None:
        """Take the losses so far."""
        for kind in get_args(LossKind):
            self._losses.labels(model, "0", kind).inc(0)  # a counter that begins above 0 has not grown
        for (engine, kind), count in losses.items():
            more = count - self._losses_counted.get((engine, kind), 0)
            self._losses.labels(model, str(engine), kind).inc(more)
        self._losses_counted = dict(losses)

    def count_kv_moves(self, model: str, moves: Mapping[int, KvMoveTotals]) -> None:
        """Take the moves so far, by the replica that streams left."""
        for engine, now in moves.items():
            of, before = (model, str(engine)), self._moves_counted.get(engine, KvMoveTotals())
            self._moves.labels(*of, "pages").inc(now.pages - before.pages)
            self._moves.labels(*of, "recomputed").inc(now.recomputed - before.recomputed)
            self._moved_bytes.labels(*of).inc(now.bytes - before.bytes)
            self._moving_s.labels(*of).inc(now.seconds - before.seconds)
        self._moves_counted = dict(moves)

    def refresh(self, replicas: Sequence[tuple[Engine, ReplicaView]]) -> None:
        """Set what says how replicas are to how they are now."""
        for gauge in (self._delta, self._low):
            gauge.clear()  # a new worker knows of none, and a replica may be gone
        gauges = {of: replica.gauges for of, replica in replicas if replica.gauges is not None}
        self._running.show({of: gauge.running for of, gauge in gauges.items()})
        self._waiting.show({of: gauge.waiting for of, gauge in gauges.items()})
        self._kv_usage.show(
            {of: (gauge.total_blocks - gauge.free_blocks) / max(1, gauge.total_blocks) for of, gauge in gauges.items()}
        )
        for of, replica in replicas:
            restarts = replica.totals.restarts
            if restarts != self._restarts_counted.get(of):
                self._restarts.labels(*of).inc(max(0, restarts - self._restarts_counted.get(of, 0)))
                self._restarts_counted[of] = restarts
            if replica.gauges is not None:
                for sampling, delta in replica.gauges.tolerance_deltas.items():
                    self._delta.labels(*of, sampling).set(delta)
                for warning in replica.gauges.low_acceptance:
                    self._low.labels(*of, warning.drafter, warning.cause.value).inc()


class DrafterSeries:
    """What the worker says of each drafter."""

    def __init__(self, make: Registered) -> None:
        self._up = make.gauge("drafter_up", "1 while a drafter works, 0 when it has failed.", "drafter")
        self._drafted = PerWorker(make.counter("drafter_draft_tokens", "Its tokens verified.", "drafter"))
        self._accepted = PerWorker(make.counter("drafter_accepted_tokens", "Its tokens accepted.", "drafter"))
        self._said = PerWorker(
            make.counter("drafter_statistics_draft_tokens", "Its tokens verified that statistics said.", "drafter")
        )
        self._right = PerWorker(
            make.counter("drafter_statistics_accepted_tokens", "Its tokens accepted that statistics said.", "drafter")
        )
        self._rounds = PerWorker(make.counter("drafter_rounds", "Rounds in which it drafted.", "drafter"))
        self._seconds = PerWorker(make.counter("drafter_seconds", "Time that its drafting took.", "drafter"))
        self.remotes = _Remotes(make)

    def count(self, of: Engine, pid: int, drafters: Sequence[DrafterState]) -> None:
        """Take what the worker with this pid has counted so far."""
        for drafter in drafters:
            self._up.labels(*of, drafter.name).set(drafter.state == "ok")
            self._drafted.update(pid, drafter.drafted, *of, drafter.name)
            self._accepted.update(pid, drafter.accepted, *of, drafter.name)
            if drafter.method == "suffix" and drafter.source:
                self._said.update(pid, drafter.statistics_drafted, *of, drafter.name)
                self._right.update(pid, drafter.statistics_accepted, *of, drafter.name)
            self._rounds.update(pid, drafter.rounds, *of, drafter.name)
            self._seconds.update(pid, drafter.draft_ms / MS_PER_S, *of, drafter.name)
            if drafter.remote is not None:
                self.remotes.count(pid, drafter.remote, *of, drafter.name)


class _Remotes:
    """Drafters in workers of their own."""

    def __init__(self, make: Registered) -> None:
        counters = {field: make.counter(*about, "drafter") for field, about in _REMOTE_COUNTS.items()}
        self._counts = {field: PerWorker(counter) for field, counter in counters.items()}
        self._rtt = make.gauge("drafter_link_rtt_seconds", "Its link's round trip, measured on it.", "drafter")
        self._restarts = make.counter("draft_worker_restarts", "Restarts of a draft worker.", "drafter")
        self._restarts_counted: dict[tuple[str, int], int] = {}
        self._busy = make.gauge("draft_worker_busy", "Share of the time that its model ran.", "drafter")
        self._targets = make.gauge("draft_worker_targets", "Replicas that are connected to it.", "drafter")

    def count(self, pid: int, remote: RemoteState, *labels: str) -> None:
        for field, count in self._counts.items():
            count.update(pid, getattr(remote, field), *labels)
        self._rtt.labels(*labels).set(remote.rtt_ms / MS_PER_S)

    def refresh(self, model: str, drafts: Sequence[DraftView]) -> None:
        """Draft workers are counted under the number that they have among those of one draft."""
        self._busy.clear()
        self._targets.clear()
        for draft in drafts:
            self._refresh(model, draft)

    def _refresh(self, model: str, draft: DraftView) -> None:
        if draft.load is not None:
            labels = (model, str(draft.number), draft.name)
            self._busy.labels(*labels).set(draft.load.busy)
            self._targets.labels(*labels).set(draft.load.targets)
        of = (draft.name, draft.number)
        counted = self._restarts_counted.get(of, 0)
        self._restarts.labels(model, str(draft.number), draft.name).inc(max(0, draft.restarts - counted))
        self._restarts_counted[of] = draft.restarts
