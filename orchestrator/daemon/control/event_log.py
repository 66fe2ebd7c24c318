"""What the log says when a replica's gauges have changed: drafters, SLO actions, acceptance, memory, files."""

from __future__ import annotations

import logging

from orchestrator.daemon.control.health import acceptance_alarm
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import Gauges, MemoryBound

_log = logging.getLogger(__name__)


def log_changes(replica: str, before: Gauges | None, now: Gauges) -> None:
    acceptance_alarm.log_new_episodes(replica, before, now)
    for drafter in _find_failed_drafters(before, now):
        _log.warning("drafter %s failed and is not used any more: %s", drafter.name, drafter.reason)
    if why := describe_slo_change(before, now):
        _log.info("objectives of %s: %s", replica, why)
    if now.memory_bound != (bound := before.memory_bound if before else None):
        _tell_memory_bound(replica, bound, now.memory_bound)
    for file in now.corrupt:
        if before is None or file not in before.corrupt:
            _log.error("damaged since it was loaded, the next load makes it again: %s", file)


def _tell_memory_bound(replica: str, before: MemoryBound | None, now: MemoryBound | None) -> None:
    if now is None:
        _log.info("%s: forwards may be as large as ever again", replica)
    elif before is None or now.rows < before.rows:
        text = "%s: out of memory; forwards have %d of %d rows at most, %d sequences, for %g s: %s"
        _log.warning(text, replica, now.rows, now.most_rows, now.sequences, now.holds_s, now.last)


def _find_failed_drafters(before: Gauges | None, now: Gauges) -> list[DrafterState]:
    known = {drafter.name for drafter in before.drafters if drafter.state == "failed"} if before else set()
    return [drafter for drafter in now.drafters if drafter.state == "failed" and drafter.name not in known]


def describe_slo_change(before: Gauges | None, now: Gauges) -> str:
    """Return what is moved for objectives, and why, where it is not what it was; "" else."""
    levers = before.slo.levers if before is not None and before.slo is not None else ["nothing"]
    return now.slo.why if now.slo is not None and now.slo.levers != levers else ""
