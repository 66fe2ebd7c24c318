"""Groups of equal bits for people: who goes on for whom, and what the loss of each part costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.plain_table import print_table

_FATES: Final = {
    "pause": "go on at {to} with the same bits, after a pause",
    "change_bits": "go on at {to}, with other bits from there on",
    "wait": "wait until their own bits serve again",
}


def print_pool(pool: Mapping[str, Any]) -> None:
    """Print `groups` and `losses` as plain data has them. `figures`: what tokens a second are."""
    title = f"groups of equal bits; streams change them by failover.other_bits: {pool['other_bits']}"
    rows = [
        (group["group"], ", ".join(group["members"]), ", ".join(group["then"]) or "nobody") for group in pool["groups"]
    ]
    print_table(("group", "replicas", "once none is left, who goes on"), rows, title=title)
    lost = []
    for loss in pool["losses"]:
        share = "not known" if loss["share"] is None else f"{loss['share']:.0%}"
        lost.append((loss["part"], share, _FATES[loss["streams"]].format(to=" or ".join(loss["to"]))))
    print_table(("what is lost", f"of the {pool['figures']} tokens/s", "running streams"), lost)
