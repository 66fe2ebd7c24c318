"""Metrics of each drafter, and of those in workers of their own."""

from __future__ import annotations

from collections.abc import Sequence

from device_profiles.units import MS_PER_S
from orchestrator.daemon.api.metrics.series import Engine, PerWorker, Registered
from orchestrator.daemon.control.port import DraftView
from orchestrator.protocol.draft_messages import DrafterState, RemoteState


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
        self._asks = PerWorker(make.counter("drafter_asks", "Rounds that asked it for drafts.", "drafter"))
        self._late = PerWorker(make.counter("drafter_late_answers", "Answers after the round had gone on.", "drafter"))
        self._connections = PerWorker(make.counter("drafter_connections", "Times it was connected.", "drafter"))
        self._hits = PerWorker(
            make.counter("drafter_ahead_hits", "Drafts there before they were asked for.", "drafter")
        )
        self._misses = PerWorker(make.counter("drafter_ahead_misses", "Drafts that were not there yet.", "drafter"))
        self._sent = PerWorker(make.counter("drafter_link_sent_bytes", "Bytes sent to it over its link.", "drafter"))
        self._received = PerWorker(
            make.counter("drafter_link_received_bytes", "Bytes that came from it over its link.", "drafter")
        )
        self._rtt = make.gauge("drafter_link_rtt_seconds", "Its link's round trip, measured on it.", "drafter")
        self._restarts = make.counter("draft_worker_restarts", "Restarts of a draft worker.", "drafter")
        self._restarts_counted: dict[tuple[str, int], int] = {}
        self._busy = make.gauge("draft_worker_busy", "Share of the time that its model ran.", "drafter")
        self._targets = make.gauge("draft_worker_targets", "Replicas that are connected to it.", "drafter")

    def count(self, pid: int, remote: RemoteState, *labels: str) -> None:
        self._asks.update(pid, remote.asks, *labels)
        self._late.update(pid, remote.late, *labels)
        self._connections.update(pid, remote.connections, *labels)
        self._hits.update(pid, remote.ahead_hits, *labels)
        self._misses.update(pid, remote.ahead_misses, *labels)
        self._sent.update(pid, remote.sent_bytes, *labels)
        self._received.update(pid, remote.received_bytes, *labels)
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
