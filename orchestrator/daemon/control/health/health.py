"""The health of devices, hosts and links, and of the workers on them: fed by what happens, read by whoever chooses.

A part's state is that of its breaker (policies.serving.failover.health). It enters routing (what is open takes nothing,
what is half-open one stream, what is suspect costs more), the start of workers, standbys, and plans. No effects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from device_profiles.device_names import list_rank_devices
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.control.port import HealthView
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import FailureKind
from orchestrator.protocol.rounds import RoundReport
from policies.serving.failover.blame import SETTLED_TOKENS, LossKind
from policies.serving.failover.health import (
    DEVICE_WEIGHT,
    FIRST_HOST_OPEN_S,
    HOST_OPEN_S,
    LOSS_WEIGHT,
    OPEN_FROM,
    PROVES,
    REFUSES,
    SUSPECT_HEALTH,
    Breaker,
    Health,
    PartKind,
    Slowness,
)

_WORST: Final = (Health.CORDONED, Health.DRAINING, Health.OPEN, Health.HALF_OPEN, Health.SUSPECT, Health.HEALTHY)
# ADR 0053: a link opens with its first failure.
_LINK_WEIGHT: Final = 1.0
# Of a breaker's score: some ten minutes after one failure. ADR 0053.
_FORGOTTEN: Final = 1e-3


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A device ("HOST/DEVICE"), a host, a worker by its name, or a link ("TARGET-DRAFT")."""

    kind: PartKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def list_parts(spec: WorkerSpec, *, first: bool = False) -> tuple[Part, ...]:
    """Return the device that a worker of this spec runs on, those of all its ranks, and the host where it is bound to
    one. `first`: of ranks the first one's device alone, which losses are charged to: nobody knows whose fault it is."""
    ranks = 1 if first else spec.options.get("model", {}).get("tensor_parallel", 1)
    names = dict.fromkeys(list_rank_devices(spec.device, ranks)) if spec.device else ()
    devices = (Part("device", f"{spec.node or THIS_NODE}/{name}") for name in names)
    return (*devices, *((Part("host", spec.node),) if spec.node not in ("", THIS_NODE) else ()))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The worst state of some parts, and why."""

    state: Health
    why: str = ""

    @property
    def refuses(self) -> bool:
        return self.state in REFUSES

    @property
    def held(self) -> bool:
        return self.state in (Health.DRAINING, Health.CORDONED)


class PartHealth(NamedTuple):
    """A part's health as the planner takes it: 1 is healthy, 0 takes nothing; and why."""

    share: float
    why: str


_WELL: Final = Judgement(Health.HEALTHY)


class HealthBoard:
    def __init__(self) -> None:
        self._breakers: dict[Part, Breaker] = {}
        self._held: dict[Part, Health] = {}
        self._weighed: dict[Part, PartHealth] = {}
        self._unwell: frozenset[Part] = frozenset()
        self.quiet = True  # nothing was observed of late that any part could be blamed for
        self._holds_s = (math.inf, -math.inf)  # when `_weighed` and `_unwell` are what they would be anew
        self._slow: dict[str, Slowness] = {}
        self._proven: dict[str, int] = {}  # tokens of each worker since it was started on a half-open part

    def judge(self, parts: Iterable[Part], now_s: float, worker: str = "") -> Judgement:
        """Return the worst state of these parts, and of the worker of this name."""
        judgements = [
            Judgement(breaker.judge(now_s), f"{part} is {_say(breaker, now_s)}")
            for part in (*parts, Part("worker", worker))
            if (breaker := self._breakers.get(part)) is not None
        ]
        slow = self._slow.get(worker)
        if slow is not None and slow.outlier:
            judgements.append(Judgement(Health.SUSPECT, f"its rounds take {slow.ratio:.1f} times what is predicted"))
        return min(judgements, key=lambda judgement: _WORST.index(judgement.state), default=_WELL)

    def wait_s(self, parts: Iterable[Part], now_s: float) -> float:
        return max((self._breakers[part].wait_s(now_s) for part in parts if part in self._breakers), default=0.0)

    def observe_loss(
        self, worker: str, parts: Sequence[Part], kind: LossKind, failure: FailureKind, cause: str, now_s: float
    ) -> None:
        self._proven.pop(worker, None)
        slow = self._slow.pop(worker, None)
        if slow is not None and slow.outlier:
            self._weigh_anew()
        weights = {
            "device": DEVICE_WEIGHT.get(failure, LOSS_WEIGHT[kind]),
            "host": OPEN_FROM if kind == "host" else 0.0,
        }
        for part in parts:
            self._fail(part, weights.get(part.kind, 0.0), cause, now_s, proves=kind in PROVES)

    def observe_fault(self, parts: Iterable[Part], why: str, now_s: float) -> None:
        """A device says itself that it does not work: it is open, and as long as it says so."""
        for part in parts:
            if part.kind == "device":
                self._fail(part, OPEN_FROM, why, now_s)

    def observe_link(self, link: str, *, connected: bool, reason: str, now_s: float) -> None:
        part = Part("link", link)
        if not connected:
            self._fail(part, _LINK_WEIGHT, reason, now_s)
        elif part in self._breakers:
            self._set(part, self._breakers[part].observe_success(now_s))

    def observe_round(self, worker: str, parts: Sequence[Part], done: RoundReport, now_s: float) -> None:
        """A worker on these parts finished a round. Enough tokens prove a half-open part."""
        if done.expected_ms:
            before = self._slow.get(worker, Slowness())
            slowness = self._slow[worker] = before.observe(done.expected_ms, done.round_ms)
            if slowness.outlier is not before.outlier:
                self._weigh_anew()
        if not self._breakers:
            return
        tried = [part for part in parts if part in self._breakers and self._breakers[part].opened]
        if not tried:
            return
        tokens = self._proven.get(worker, 0) + sum(len(delta.tokens) for delta in done.deltas)
        self._proven[worker] = tokens
        if tokens >= SETTLED_TOKENS:
            for part in tried:
                self._set(part, self._breakers[part].observe_success(now_s))
            del self._proven[worker]

    def hold(self, part: Part, state: Health | None) -> None:
        self._set(part, self._breakers.get(part, Breaker()).hold(state))
        if state is not None:
            self._held[part] = state
        else:
            self._held.pop(part, None)

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def list_held(self, state: Health) -> list[Part]:
        return [part for part, held in self._held.items() if held is state] if self._held else []

    def weigh_parts(self, now_s: float) -> dict[Part, PartHealth]:
        """Return the parts that are not healthy: the same dictionary until something has changed."""
        if not self._holds_s[0] <= now_s < self._holds_s[1]:
            self._weigh(now_s)
        return self._weighed

    def find_unwell(self, now_s: float) -> frozenset[Part]:
        """Return the parts that are not healthy, and slow workers: the same set until something has changed."""
        if not self._holds_s[0] <= now_s < self._holds_s[1]:
            self._weigh(now_s)
        return self._unwell

    def _weigh(self, now_s: float) -> None:
        gone = [part for part, breaker in self._breakers.items() if _is_over(breaker, now_s)]
        for part in gone:
            del self._breakers[part]
        judgements = {part: self.judge([part], now_s) for part in self._breakers}
        self._weighed = {
            part: PartHealth(0.0 if judgement.refuses else SUSPECT_HEALTH, judgement.why)
            for part, judgement in judgements.items()
            if judgement.state is not Health.HEALTHY
        }
        slow = {Part("worker", worker) for worker, slowness in self._slow.items() if slowness.outlier}
        self._unwell = frozenset(slow.union(self._weighed))
        self.quiet = not self._breakers and not slow
        ends = [self._breakers[part].find_end(now_s) for part in self._weighed]
        self._holds_s = (now_s, min(ends, default=math.inf))

    def _weigh_anew(self) -> None:
        self.quiet = False
        self._holds_s = (math.inf, -math.inf)

    def _set(self, part: Part, breaker: Breaker) -> None:
        self._breakers[part] = breaker
        self._weigh_anew()

    def views(self, now_s: float) -> tuple[HealthView, ...]:
        parts = [
            HealthView(part.kind, part.name, state.value, breaker.why, breaker.wait_s(now_s))
            for part, breaker in sorted(self._breakers.items())
            if (state := breaker.judge(now_s)) is not Health.HEALTHY
        ]
        slow = [
            HealthView("worker", worker, Health.SUSPECT.value, self.judge((), now_s, worker).why, 0.0)
            for worker, slowness in sorted(self._slow.items())
            if slowness.outlier
        ]
        return (*parts, *slow)

    def _fail(self, part: Part, weight: float, why: str, now_s: float, *, proves: bool = True) -> None:
        if weight > 0.0:
            known = self._breakers.get(part) or Breaker()
            if part.kind in ("host", "link"):
                known = replace(known, first_s=FIRST_HOST_OPEN_S, longest_s=HOST_OPEN_S)
            self._set(part, known.observe_failure(weight, why, now_s, proves=proves))


def _is_over(breaker: Breaker, now_s: float) -> bool:
    return breaker.held is None and not breaker.opened and breaker.weigh(now_s) < _FORGOTTEN


def _say(breaker: Breaker, now_s: float) -> str:
    state = breaker.judge(now_s)
    why = f": {breaker.why}" if breaker.why and breaker.held is None else ""
    return f"{state.value.replace('_', '-')}{why}"
