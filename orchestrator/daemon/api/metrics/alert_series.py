"""Metrics that alerts are about: what speculation costs and saves, and what is not as it was or should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from device_profiles.units import MS_PER_S
from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.streams.overrides import NO_OVERRIDES
from orchestrator.protocol.rounds import RoundReport
from policies.running_mean import update_mean

_USUAL_TOKENS = 50_000
"""Drafted tokens that the usual acceptance rate remembers. ADR 0070. Not tuned."""
_KNOWN_TOKENS = 200
"""Drafted tokens from which on it is told. ADR 0070. As LEAST_DRAFTED."""
_NEW_SHARE = 0.1
"""The weight of a plain round in the running mean of its number of sequences. ADR 0070. Not tuned."""
_WHAT = ("drafter", "override", "memory", "standby", "cluster", "host")


@dataclass(slots=True)
class _Usual:
    drafted: int = 0
    rate: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.rate += (accepted / drafted - self.rate) * drafted / min(self.drafted, _USUAL_TOKENS)


@dataclass(slots=True)
class _PlainRounds:
    """Time of rounds that decode without drafts, by the number of sequences, in milliseconds."""

    _mean_ms: dict[int, float] = field(default_factory=dict)

    def add(self, done: RoundReport) -> None:
        before = self._mean_ms.get(done.sequences, done.round_ms)
        self._mean_ms[done.sequences] = update_mean(before, done.round_ms, _NEW_SHARE)

    def estimate_ms(self, done: RoundReport) -> float:
        """Return the time of a plain round of as many sequences: at most that of this round without its drafting."""
        bound = max(0.0, done.round_ms - done.draft_ms)
        return min(bound, self._mean_ms.get(done.sequences, bound))


class AlertSeries:
    """See the module. `count_deadly` returns how many requests are refused for having ended the daemon."""

    def __init__(self, make: Registered, count_deadly: Callable[[], int] = lambda: 0) -> None:
        self._count_deadly = count_deadly
        self._usual_rate = make.gauge("drafter_usual_acceptance_rate", "Accepted by drafted tokens so far.", "drafter")
        self._saved = make.counter("drafter_saved_seconds", "Plain rounds that its tokens saved.", "drafter")
        self._spent = make.counter("speculation_seconds", "Time of rounds with drafts, without prompts.")
        self._plain = make.counter("speculation_plain_seconds", "Time of plain rounds for the same tokens.")
        self._changes = make.counter("class_changes", "Times a replica began to serve with other bits.")
        self._differs = make.gauge("effective_state_differs", "1 while it is not as configured.", "what")
        self._quarantined = make.gauge(
            "quarantined_requests", "Requests refused for having ended workers, or the daemon."
        )
        self._usual: dict[tuple[str, ...], _Usual] = {}
        self._plain_rounds: dict[Engine, _PlainRounds] = {}
        self._classes: dict[int, str] = {}

    def observe(self, of: Engine, done: RoundReport) -> None:
        plain = self._plain_rounds.setdefault(of, _PlainRounds())
        for name, (drafted, accepted) in done.by_drafter.items():
            if drafted and name != "grammar":
                usual = self._usual.setdefault((*of, name), _Usual())
                usual.add(drafted, accepted)
                if usual.drafted >= _KNOWN_TOKENS:
                    self._usual_rate.labels(*of, name).set(usual.rate)
        if not done.sequences or done.rows > done.sequences + done.drafted:
            return  # a prompt was in it
        if not done.drafts:
            plain.add(done)
            return
        plain_s = plain.estimate_ms(done) / done.sequences / MS_PER_S
        self._spent.labels(*of).inc(done.round_ms / MS_PER_S)
        self._plain.labels(*of).inc(plain_s * sum(len(delta.tokens) for delta in done.deltas))
        for name, (_, accepted) in done.by_drafter.items():
            if name != "grammar":
                self._saved.labels(*of, name).inc(plain_s * accepted)

    def refresh(self, model: str, view: StateView) -> None:
        self._quarantined.labels(model, "0").set(view.quarantined + self._count_deadly())
        for replica in view.replicas:
            if replica.ready is not None and replica.ready.precision.class_fingerprint:
                now = replica.ready.precision.class_fingerprint
                self._changes.labels(model, str(replica.engine)).inc(now != self._classes.get(replica.engine, now))
                self._classes[replica.engine] = now
        drafters = [drafter for replica in view.replicas if replica.gauges for drafter in replica.gauges.drafters]
        differs = {
            "drafter": any(drafter.state not in ("ok", "starting", "resting") for drafter in drafters),
            "override": view.overrides != NO_OVERRIDES,
            "memory": any(
                replica.ready.device.memory_reduced for replica in view.replicas if replica.ready is not None
            ),
            "standby": any(replica.unlike for replica in view.replicas),
            "cluster": bool(view.cluster_away),
            "host": view.cluster_members is not None and bool(view.cluster_members.lost),
        }
        for what in _WHAT:
            self._differs.labels(model, "0", what).set(differs[what])
