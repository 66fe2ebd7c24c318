"""`outrider canary`: how the canary's share of requests does, and the operator's decision on it."""

from __future__ import annotations

from math import inf
from typing import Any

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.plain_table import print_lines, print_table

app = typer.Typer(help="Compare a share of requests that is drafted for by another variant with the control.")


_SHOWN = {
    "ttft_ms": ("TTFT", "ms", 1),
    "tpot_ms": ("TPOT", "ms", 2),
    "acceptance": ("acceptance rate", "", 3),
    "agreement": ("the target's own tokens", "", 3),
}


@app.command()
@admin_command
def status(daemon: Daemon) -> None:
    """Show both variants' figures with their 95 % intervals, and what was decided on which of them."""
    _show(daemon.ask("/admin/canary"))


@app.command()
@admin_command
def promote(daemon: Daemon) -> None:
    """Serve every new request by the canary; running ones end as they began."""
    _show(daemon.ask("/admin/canary/promote", {}))


@app.command()
@admin_command
def abort(daemon: Daemon) -> None:
    """Serve no new request by the canary; running ones end as they began."""
    _show(daemon.ask("/admin/canary/abort", {}))


@app.command()
@admin_command
def restart(daemon: Daemon) -> None:
    """Forget the figures and what was decided, and begin the trial anew."""
    _show(daemon.ask("/admin/canary/restart", {}))


def _show(answer: dict[str, Any]) -> None:
    title = f"canary: {answer['phase'].replace('_', ' ')}"
    print_table(("", "others", "canary", "canary - others"), build_canary_rows(answer), title=title)
    print_lines(*lines(answer), wraps=False)


def build_canary_rows(answer: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the table's rows: the mean of each variant, and the 95 % interval of the difference."""
    arms = [answer["arms"][arm] for arm in ("control", "canary")]
    counted = [str(arm["ttft_ms"]["requests"]) for arm in arms]
    found = [("requests", counted[0], counted[1], "")]
    for name, (title, unit, digits) in _SHOWN.items():
        both = [_mean(name, arm[name], digits) for arm in arms]
        gap = answer["differences"][name]
        found.append((f"{title} {unit}".strip(), both[0], both[1], _range(gap, digits, sign="+")))
    return found


def _possible(name: str, figure: dict[str, Any]) -> dict[str, Any]:
    """Return an interval without what cannot be: times below 0, rates above 1."""
    if figure["low"] is None:
        return figure
    most = 1.0 if name in ("acceptance", "agreement") else inf
    return {"low": max(0.0, figure["low"]), "high": min(most, figure["high"])}


def _mean(name: str, figure: dict[str, Any], digits: int) -> str:
    if figure["mean"] is None:
        return "-"
    around = _range(_possible(name, figure), digits)
    return f"{figure['mean']:.{digits}f}" + (f" ({around})" if around else "")


def _range(interval: dict[str, Any], digits: int, sign: str = "") -> str:
    if interval["low"] is None or interval["high"] is None:
        return ""
    return f"{interval['low']:{sign}.{digits}f} to {interval['high']:{sign}.{digits}f}"


def lines(answer: dict[str, Any]) -> list[str]:
    """Return what stands below the table: what is tried, what was decided and why, and what comes next."""
    found = [f"share of new requests: {answer['effective_share']:.1%} (canary.share {answer['share']:.1%})"]
    found += [f"differs: {one}" for one in answer["differs"]]
    decision = answer["decision"]
    if decision:
        found.append(f"decided {decision['at']} by the {decision['by']}: {decision['reason']}")
    found.append(f"next: {answer['outlook']}")
    if answer["phase"] == "promoted":
        found += [f"to keep it: {one}" for one in answer["to_keep"]]
    return found
