"""The tables of `outrider top`: what two statuses of a daemon say of the time between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from device_profiles.units import human_bytes

WINDOW_S: Final = 10.0
"""Rates are those of so many seconds: short enough to see a change, long enough to read."""

Cell = str | float | None
"""What stands in a column. None is not known, and is shown as "-"."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and how its numbers are shown."""

    name: str
    show: Callable[[float], str] = lambda number: f"{number:.0f}"

    def format(self, cell: Cell) -> str:
        """Return a cell as text."""
        if cell is None:
            return "-"
        return cell if isinstance(cell, str) else self.show(cell)


def _show_tenths(number: float) -> str:
    return f"{number:.1f}"


def _show_percent(share: float) -> str:
    return f"{share:.0%}"


_RATES = (
    Column("tokens/s", _show_tenths),
    Column("accepted", _show_percent),
    Column("depth", _show_tenths),
)
REPLICAS = (
    Column("replica"),
    Column("state"),
    *_RATES,
    Column("running"),
    Column("waiting"),
    Column("KV", _show_percent),
    Column("memory", human_bytes),
    Column("drafts by"),
    Column("device"),
)
DRAFTS = (
    Column("draft"),
    Column("for"),
    Column("state"),
    Column("drafted/s", _show_tenths),
    Column("accepted", _show_percent),
    Column("ms a round", _show_tenths),
    Column("busy", _show_percent),
)
DEVICES = (
    Column("device"),
    Column("ours", _show_percent),
    Column("other programs", _show_percent),
    Column("queue", _show_tenths),
    Column("memory free", human_bytes),
    Column("memory ours", human_bytes),
    Column("°C"),
    Column("W"),
    Column("note"),
)
REQUESTS = (
    Column("request"),
    Column("state"),
    Column("age s", _show_tenths),
    Column("replica"),
    Column("prompt"),
    Column("tokens"),
    Column("depth", _show_tenths),
    Column("queue ms"),
    Column("key"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A status, and when it came: seconds of a clock that never goes back."""

    at_s: float
    status: dict[str, Any]


@dataclass(slots=True)
class History:
    """The newest status, and those of the last seconds."""

    _samples: deque[Sample] = field(default_factory=deque)

    def add(self, at_s: float, status: dict[str, Any]) -> None:
        """Take in a status. Those of a daemon that was there before it are forgotten."""
        if self._samples and status["uptime_s"] < self._samples[-1].status["uptime_s"]:
            self._samples.clear()
        self._samples.append(Sample(at_s, status))
        while len(self._samples) > 2 and at_s - self._samples[1].at_s >= WINDOW_S:
            self._samples.popleft()

    @property
    def newest(self) -> dict[str, Any]:
        """The newest status."""
        return self._samples[-1].status

    def list_replicas(self) -> list[list[Cell]]:
        """Return a row for each replica and standby, as REPLICAS says."""
        before = {key: one["totals"] for key, one in _pair_replicas(self._samples[0].status)}
        return [
            self._describe_replica(key[0], one, before.get(key, one["totals"]))
            for key, one in _pair_replicas(self.newest)
        ]

    def list_drafts(self) -> list[list[Cell]]:
        """Return a row for each drafter of a replica and each draft worker, as DRAFTS says."""
        before = {key: one["totals"] for key, one in _pair_replicas(self._samples[0].status)}
        rows: list[list[Cell]] = []
        for key, one in _pair_replicas(self.newest):
            for drafter in (one["gauges"] or {}).get("drafters", []):
                counts = [
                    totals["by_drafter"].get(drafter["name"], {"drafted": 0, "accepted": 0})
                    for totals in (one["totals"], before.get(key, one["totals"]))
                ]
                drafted, accepted = (counts[0][name] - counts[1][name] for name in ("drafted", "accepted"))
                took = drafter["draft_ms"] / drafter["rounds"] if drafter["rounds"] else None
                rate = self._divide_by_time(drafted)
                share = accepted / drafted if drafted > 0 else None
                rows.append(
                    [
                        drafter["name"],
                        _name(key),
                        "rests" if drafter["rests"] else drafter["state"],
                        rate,
                        share,
                        took,
                        None,
                    ]
                )
        for target in _list_targets(self.newest):
            for draft in target["drafts"]:
                busy = draft["load"]["busy"] if draft["load"] else None
                whom = ", ".join(draft["targets"]) or "nobody"
                rows.append([f"worker {draft['name']}", whom, draft["phase"], None, None, None, busy])
        return rows

    def list_devices(self) -> list[list[Cell]]:
        """Return a row for each device, as DEVICES says."""
        named = {one["name"]: one for target in _list_targets(self.newest) for one in target["devices"]}
        return [_describe_device(one) for one in named.values()]

    def list_requests(self) -> list[list[Cell]]:
        """Return a row for each live request, as REQUESTS says."""
        named = ("request_id", "state", "age_s", "replica", "prompt_tokens", "tokens", "depth", "queue_ms", "key")
        return [[None if one[name] == "" else one[name] for name in named] for one in self.newest["requests"]]

    def describe(self) -> str:
        """Return in a line how the daemon does as a whole."""
        told = []
        for one in _list_targets(self.newest):
            gauges = one["gauges"] or {"running": 0, "waiting": 0}
            speed, slo = one["speed"] or {}, one["slo"]
            missing = len(one["serving"]["missing"])
            line = f"{one['model'] or 'no model yet'}: {one['phase']}"
            line += f", {missing} of {one['serving']['planned']} replicas do not serve" if missing else ""
            line += f", {speed.get('tokens_per_s', 0.0):.1f} tokens/s"
            if speed.get("ttft_ms") is not None:
                line += f", first token {speed['ttft_ms']:.0f} ms"
            line += f", {gauges['running']} running, {gauges['waiting']} waiting, {one['streams']} streams"
            line += f", goodput {slo['goodput_per_s']:.2f}/s" if slo else ""
            problems = len(one["health"])
            line += f", {problems} unhealthy: `outrider health`" if problems else ""
            told.append(line)
        return "\n".join(told)

    def _describe_replica(self, model: str, one: dict[str, Any], before: dict[str, Any]) -> list[Cell]:
        gauges, ready, totals = one["gauges"] or {}, one["ready"] or {}, one["totals"]
        generated, drafts, drafted, accepted = (
            totals[name] - before[name] for name in ("generated", "drafts", "drafted", "accepted")
        )
        blocks = gauges.get("total_blocks", 0)
        return [
            _name((model, one["name"])),
            one["held"] or one["phase"],
            self._divide_by_time(generated),
            accepted / drafted if drafted > 0 else None,
            drafted / drafts if drafts > 0 else None,
            gauges.get("running"),
            gauges.get("waiting"),
            (blocks - gauges["free_blocks"]) / blocks if blocks else None,
            gauges.get("rss_bytes"),
            one["draft"] or "nothing",
            f"{ready['adapter']} {ready['device']}" if ready else None,
        ]

    def _divide_by_time(self, count: float) -> float | None:
        """Return so many in a second; None after one status alone."""
        seconds = self._samples[-1].at_s - self._samples[0].at_s
        return max(0.0, count / seconds) if seconds > 0 else None


def choose_rows(
    rows: Iterable[list[Cell]], columns: Sequence[Column], filter_text: str, sort_by: int, *, descending: bool
) -> list[list[str]]:
    """Return as text the rows that have the filter's text in a cell, sorted by a column. What is not known is last."""
    wanted = filter_text.lower()
    found = []
    for row in rows:
        shown = [column.format(cell) for column, cell in zip(columns, row, strict=True)]
        if any(wanted in text.lower() for text in shown):
            found.append((row[sort_by], shown))
    known = [pair for pair in found if pair[0] is not None]
    known.sort(key=lambda pair: _rank(pair[0]), reverse=descending)
    return [shown for _, shown in [*known, *(pair for pair in found if pair[0] is None)]]


def _rank(cell: Cell) -> tuple[bool, float, str]:
    return (True, 0.0, cell) if isinstance(cell, str) else (False, cell or 0.0, "")


def _describe_device(one: dict[str, Any]) -> list[Cell]:
    note = f"slows itself down: {one['hot']}" if one["hot"] else ""
    memory = one["memory_free_bytes"] if one["memory_total_bytes"] else None
    ours = one["memory_ours_bytes"] if one["memory_total_bytes"] else None
    used = one["ours"] if one["ours"] is not None else one["utilisation"]
    return [
        one["name"],
        used,
        one["others"] if one["ours"] is not None else None,
        one["queue_depth"],
        memory,
        ours,
        one["temperature_c"],
        one["power_w"],
        note,
    ]


def _list_targets(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [status, *status["models"]]


def _pair_replicas(status: dict[str, Any]) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """Return each replica and standby, by its model where there are several, and its name."""
    several = bool(status["models"])
    return [
        ((target["model"] if several else "", one["name"]), one)
        for target in _list_targets(status)
        for one in (*target["replicas"], *target["standbys"])
    ]


def _name(key: tuple[str, str]) -> str:
    return ": ".join(part for part in key if part)
