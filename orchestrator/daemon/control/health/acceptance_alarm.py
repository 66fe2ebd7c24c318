"""Tells people of drafts that are accepted too rarely: one line of the log for each episode, with what can be done."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from orchestrator.protocol.rounds import AcceptanceWarning, Gauges
from orchestrator.telemetry import get_logger
from policies.serving.acceptance_alarm import Cause

ADVICE: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.NOTHING_ACCEPTED: "the drafter does not go with this target, or is broken: check that it is of the same "
        "model family, template and vocabulary, and try another device or precision for it",
        Cause.SAMPLING: "greedy requests fare well: sample at a lower temperature, or ask for the acceptance rule "
        "'rejection', under which more drafts are accepted",
        Cause.ONE_CLASS: "other requests fare well: switch speculation off for this user (`outrider speculation off "
        "--user TAG`), or give its text a drafter of its own",
        Cause.TOO_DEEP: "first tokens are accepted and later ones are not: bound the depth (`outrider speculation "
        "at-most 2`, or speculation.num_speculative_tokens)",
        Cause.OVERCONFIDENT: "the drafter is far surer than it should be: it may be trained on other text, or too "
        "coarsely quantised; try another draft model or precision",
        Cause.HARD_TEXT: "the drafter promises little and keeps it: this text is hard to foresee, and another drafter "
        "may do better; raise nothing, depth follows acceptance by itself",
    }
)

_log = get_logger(__name__)


def log_new_episodes(replica: str, before: Gauges | None, now: Gauges) -> None:
    """Log the episodes that have begun since the state before. The user tag is the request's, and stays out."""
    known = {_key(warning) for warning in before.low_acceptance} if before is not None else set()
    for warning in now.low_acceptance:
        if _key(warning) not in known:
            _log.warning(
                "low acceptance",
                drafter=warning.drafter,
                replica=replica,
                route=warning.route,
                one_user=bool(warning.user),
                acceptance=round(warning.rate, 4),
                upper=round(warning.upper, 4),
                threshold=warning.threshold,
                drafted=warning.drafted,
                cause=warning.cause.value,
                advice=ADVICE[warning.cause],
            )


def _key(warning: AcceptanceWarning) -> tuple[str, str, str]:
    return (warning.drafter, warning.route, warning.user)
