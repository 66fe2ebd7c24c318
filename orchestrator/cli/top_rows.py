"""The tables of `outrider top`: what two statuses of a daemon say of the time between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from device_profiles.units import human_bytes

WINDOW_S: Final = 10.0
"""Rates are those of so many seconds: short enough to see a change, long enough to read."""

Cell = str | float | None
"""What stands in a column. None is not known, and is shown as "-"."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and how its numbers are shown: by a format, or `bytes`."""

    name: str
    shown: str = ".0f"

    def format(self, cell: Cell) -> str:
        if cell is None or isinstance(cell, str):
            return "-" if cell is None else cell
        return human_bytes(cell) if self.shown == "bytes" else format(cell, self.shown)


def _build_columns(text: str) -> tuple[Column, ...]:
    """Return the columns of a text: names, some with how numbers are shown behind a colon."""
    return tuple(Column(*column.strip().split(":")) for column in text.split("|"))


REPLICAS = _build_columns(
    "replica | state | tokens/s:.1f | accepted:.0% | depth:.1f | running | waiting | KV:.0% | memory:bytes | drafts by "
    "| device"
)
DRAFTS = _build_columns("draft | for | state | drafted/s:.1f | accepted:.0% | ms a round:.1f | busy:.0%")
DEVICES = _build_columns(
    "device | ours:.0% | other programs:.0% | queue:.1f | memory free:bytes | memory ours:bytes | °C | W | note"
)
REQUESTS = _build_columns("request | state | age s:.1f | replica | prompt | tokens | depth:.1f | queue ms | key")


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
        return self._samples[-1].status

    def list_replicas(self) -> list[list[Cell]]:
        before = self._read_first_totals()
        return [
            self._build_replica_row(key, replica, before.get(key, replica["totals"]))
            for key, replica in _pair_replicas(self.newest)
        ]

    def list_drafts(self) -> list[list[Cell]]:
        before = self._read_first_totals()
        rows: list[list[Cell]] = []
        for key, replica in _pair_replicas(self.newest):
            for drafter in (replica["gauges"] or {}).get("drafters", []):
                now, then = (
                    totals["by_drafter"].get(drafter["name"], {"drafted": 0, "accepted": 0})
                    for totals in (replica["totals"], before.get(key, replica["totals"]))
                )
                drafted, accepted = (now[name] - then[name] for name in ("drafted", "accepted"))
                state = "rests" if drafter["rests"] else drafter["state"]
                share = accepted / drafted if drafted > 0 else None
                took_ms = drafter["draft_ms"] / drafter["rounds"] if drafter["rounds"] else None
                rate = self._divide_by_time(drafted)
                rows.append([drafter["name"], _join_names(key), state, rate, share, took_ms, None])
        for target in _list_targets(self.newest):
            for draft in target["drafts"]:
                busy = draft["load"]["busy"] if draft["load"] else None
                whom = ", ".join(draft["targets"]) or "nobody"
                rows.append([f"worker {draft['name']}", whom, draft["phase"], None, None, None, busy])
        return rows

    def list_devices(self) -> list[list[Cell]]:
        named = {device["name"]: device for target in _list_targets(self.newest) for device in target["devices"]}
        return [_build_device_row(device) for device in named.values()]

    def list_requests(self) -> list[list[Cell]]:
        names = ("request_id", "state", "age_s", "replica", "prompt_tokens", "tokens", "depth", "queue_ms", "key")
        rows = ([request[name] for name in names] for request in self.newest["requests"])
        return [[None if cell == "" else cell for cell in row] for row in rows]

    def format_summary(self) -> str:
        lines = []
        for target in _list_targets(self.newest):
            gauges = target["gauges"] or {"running": 0, "waiting": 0}
            speed, slo = target["speed"] or {}, target["slo"]
            missing, problems = len(target["serving"]["missing"]), len(target["health"])
            line = f"{target['model'] or 'no model yet'}: {target['phase']}"
            line += f", {missing} of {target['serving']['planned']} replicas do not serve" if missing else ""
            line += f", {speed.get('tokens_per_s', 0.0):.1f} tokens/s"
            if speed.get("ttft_ms") is not None:
                line += f", first token {speed['ttft_ms']:.0f} ms"
            line += f", {gauges['running']} running, {gauges['waiting']} waiting, {target['streams']} streams"
            line += f", goodput {slo['goodput_per_s']:.2f}/s" if slo else ""
            line += f", {problems} unhealthy: `outrider health`" if problems else ""
            lines.append(line)
        return "\n".join(lines)

    def _read_first_totals(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {key: replica["totals"] for key, replica in _pair_replicas(self._samples[0].status)}

    def _build_replica_row(self, key: tuple[str, str], replica: dict[str, Any], before: dict[str, Any]) -> list[Cell]:
        gauges, ready, totals = replica["gauges"] or {}, replica["ready"] or {}, replica["totals"]
        names = ("generated", "drafts", "drafted", "accepted")
        generated, drafts, drafted, accepted = (totals[name] - before[name] for name in names)
        blocks = gauges.get("total_blocks", 0)
        return [
            _join_names((key[0], replica["name"])),
            replica["held"] or replica["phase"],
            self._divide_by_time(generated),
            accepted / drafted if drafted > 0 else None,
            drafted / drafts if drafts > 0 else None,
            *(gauges.get("running"), gauges.get("waiting")),
            (blocks - gauges["free_blocks"]) / blocks if blocks else None,
            gauges.get("rss_bytes"),
            replica["draft"] or "nothing",
            f"{ready['adapter']} {ready['device']}" if ready else None,
        ]

    def _divide_by_time(self, count: float) -> float | None:
        seconds = self._samples[-1].at_s - self._samples[0].at_s
        return max(0.0, count / seconds) if seconds > 0 else None


def choose_rows(
    rows: Iterable[list[Cell]], columns: Sequence[Column], filter_text: str, sort_by: int, *, descending: bool
) -> list[list[str]]:
    """Return as text the rows that have the filter's text in a cell, sorted by a column. What is not known is last."""
    wanted = filter_text.lower()
    known: list[tuple[tuple[bool, float, str], list[str]]] = []
    unknown = []
    for row in rows:
        shown = [column.format(cell) for column, cell in zip(columns, row, strict=True)]
        if any(wanted in text.lower() for text in shown):
            if row[sort_by] is None:
                unknown.append(shown)
            else:
                known.append((_rank(row[sort_by]), shown))
    known.sort(key=lambda pair: pair[0], reverse=descending)
    return [shown for _, shown in known] + unknown


def _rank(cell: Cell) -> tuple[bool, float, str]:
    return (True, 0.0, cell) if isinstance(cell, str) else (False, cell or 0.0, "")


def _build_device_row(device: dict[str, Any]) -> list[Cell]:
    known, total = device["ours"] is not None, device["memory_total_bytes"]
    return [
        device["name"],
        device["ours"] if known else device["utilisation"],
        device["others"] if known else None,
        device["queue_depth"],
        *((device["memory_free_bytes"], device["memory_ours_bytes"]) if total else (None, None)),
        *(device["temperature_c"], device["power_w"]),
        f"does not work: {device['fault']}"
        if device["fault"]
        else device["hot"] and f"slows itself down: {device['hot']}",
    ]


def _list_targets(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [status, *status["models"]]


def _pair_replicas(status: dict[str, Any]) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    several = bool(status["models"])
    return [
        ((target["model"] if several else "", replica["name"]), replica)
        for target in _list_targets(status)
        for replica in (*target["replicas"], *target["standbys"])
    ]


def _join_names(key: tuple[str, str]) -> str:
    return ": ".join(part for part in key if part)
