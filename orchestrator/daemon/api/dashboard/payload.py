"""The state of the daemon in named parts, each of plain data. No part holds a prompt, an output, a key or a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Final

from orchestrator.clock import Clock
from orchestrator.daemon.api.admin.requests import describe_route
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.dashboard.cluster_map import build_map
from orchestrator.daemon.api.dashboard.failovers import FailoverTimeline
from orchestrator.daemon.api.follow import RequestLife, RequestLives, hide_response_id
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.served import ServedModel
from orchestrator.daemon.control.port import PlanView
from orchestrator.daemon.control.replicas.shortfall import list_shortfall
from orchestrator.errors import RequestError

_LAST_REQUESTS: Final = 50  # what a person reads. Not tuned.
_MOST_REJECTED: Final = 40  # what a person reads. Not tuned.
_REJECTED: Final = ("what", "why", "role")
_OF_SHARD: Final = ("device", "weights", "source", "stage_ms")


class DashboardState:
    """What the dashboard shows of all models, `targets` being those of `models`, in the same order."""

    def __init__(
        self, targets: Sequence[AdminTarget], models: Sequence[ServedModel], lives: RequestLives, clock: Clock
    ) -> None:
        self.timeline = FailoverTimeline(clock)
        self._targets = list(targets)
        self._models = list(models)
        self._lives = lives
        self._plans: dict[int, tuple[tuple[int, int], dict[str, Any] | None]] = {}

    def observe(self) -> None:
        """Look for failovers. To be called about once a second, whether anybody looks or not."""
        for index, target in enumerate(self._targets):
            self.timeline.observe(index, target.name(), target.control.view())

    def describe(self) -> dict[str, Any]:
        """Return the parts: `about`, `failovers`, `requests`, and for each model I `model/I/NAME`."""
        parts: dict[str, Any] = {
            "about": {"version": version("outrider"), "models": [target.name() for target in self._targets]},
            "failovers": self.timeline.describe(),
            "requests": [_sum_up(life) for life in self._lives.list_last(_LAST_REQUESTS)],
        }
        for index, (target, model) in enumerate(zip(self._targets, self._models, strict=True)):
            view = target.control.view()
            plan = self._read_plan(index, target, view.plan)
            own = {
                "state": {
                    "name": target.name(),
                    "phase": view.phase,
                    "detail": "; ".join(filter(None, [view.detail, view.cluster_away])),
                    "streams": view.streams,
                    "missing": list_shortfall(view),
                },
                "figures": read_figures(model.metrics),
                "map": build_map(view, plan, target.hosts()),
                "plan": _describe_plan(plan),
                "progress": asdict(view.plan) if view.plan is not None else None,
                "health": [asdict(part) for part in view.health],
                "slo": target.slo(),
                "costs": target.costs(),
            }
            parts.update({f"model/{index}/{name}": part for name, part in own.items()})
        return parts

    def _read_plan(self, index: int, target: AdminTarget, progress: PlanView | None) -> dict[str, Any] | None:
        """Return the running plan; it is written out anew when there is another one only."""
        if progress is None:
            return None
        mark = (progress.plans, progress.moves)
        known = self._plans.get(index)
        if known is None or known[0] != mark:
            known = self._plans[index] = (mark, target.running_plan())
        return known[1]

    def describe_request(self, request_id: str) -> dict[str, Any]:
        """Return a request's life, and where it was sent and why. Raises RequestError 404 where it is not known."""
        life = self._lives.find(request_id)
        own_id, shown_id = (request_id if life is None else life.request_id), hide_response_id(request_id)
        routes: list[dict[str, Any]] = []
        for target in self._targets:
            try:
                own = target.control.steering.explain(own_id)
                routes += [describe_route(route) | {"request_id": shown_id} for route in own]
            except RequestError:
                continue
        if life is None and not routes:
            text = "nothing is known of this request: only the last ones are kept"
            raise RequestError(text, status=404, code="request_not_found")
        return {"id": shown_id, "life": None if life is None else life.describe(), "routes": routes}


def _sum_up(life: RequestLife) -> dict[str, Any]:
    figures = {name: life.figures.get(name) for name in ("ttft_ms", "tpot_ms", "latency_ms", "acceptance", "finish")}
    moved = sum(mark.what == "moved" for mark in life.marks)
    own = {name: getattr(life, name) for name in ("model", "came_s", "status", "prompt_tokens", "tokens")}
    return {"id": life.shown_id, **own, "moved": moved, **figures}


def _describe_plan(plan: dict[str, Any] | None) -> dict[str, Any] | None:
    if plan is None or plan.get("plan") is None:
        return None
    chosen = plan["plan"]
    rejected = chosen.get("rejected", [])
    return {
        "target": chosen["target"],
        "goodput_tokens_per_s": plan.get("goodput_tokens_per_s"),
        "replicas": [_describe_planned(replica) for replica in chosen["replicas"]],
        "standby": (chosen.get("standby") or {}).get("why", ""),
        "rejected": [{name: candidate.get(name, "") for name in _REJECTED} for candidate in rejected[:_MOST_REJECTED]],
        "more_rejected": max(0, len(rejected) - _MOST_REJECTED),
    }


def _describe_planned(replica: dict[str, Any]) -> dict[str, Any]:
    draft, score = replica.get("draft") or {}, replica.get("score") or {}
    return {
        "shards": [{name: shard[name] for name in _OF_SHARD} for shard in replica["shards"]],
        "drafter": draft.get("drafter", ""),
        "depth": replica["depth"],
        "prediction": {
            name: replica["prediction"][name]
            for name in ("goodput_tokens_per_s", "plain_tokens_per_s", "tpot_ms", "ttft_ms", "tokens_per_round")
        },
        "terms": [{name: term[name] for name in ("name", "value", "why")} for term in score.get("terms", [])],
    }


PREFIX: Final = "outrider_"
_OF_ENGINES: Final = frozenset(
    {
        "acceptance_rate",
        "generation_tokens_total",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens_total",
        "request_success_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_drafts_total",
        "tokens_per_second",
        "worker_losses_total",
        "worker_restarts_total",
    }
)
_PERCENTILES: Final = {"recent_ttft_seconds": "ttft", "recent_tpot_seconds": "tpot"}


def read_figures(metrics: Metrics) -> dict[str, Any]:
    """Return the figures now: by the replica's number and the metric's name without `outrider_`, its labels added up;
    and percentiles in seconds by "ttft" and "tpot"."""
    metrics.refresh()
    wanted = [PREFIX + name for name in (*_OF_ENGINES, *_PERCENTILES)]
    engines: dict[str, dict[str, float]] = {}
    percentiles: dict[str, dict[str, float]] = {}
    for family in metrics.registry.restricted_registry(wanted).collect():
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name in _PERCENTILES:
                percentiles.setdefault(_PERCENTILES[name], {})[sample.labels["percentile"]] = sample.value
            elif name in _OF_ENGINES:
                figures = engines.setdefault(sample.labels["engine"], {})
                figures[name] = figures.get(name, 0.0) + sample.value
    return {"engines": engines, "percentiles": percentiles}
