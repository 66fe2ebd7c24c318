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


def _add_command(name: str, route: str, what: str) -> None:
    @app.command(name, help=what)
    @admin_command
    def command(daemon: Daemon) -> None:
        answer = daemon.ask(route, None if name == "status" else {})
        title = f"canary: {answer['phase'].replace('_', ' ')}"
        print_table(("", "others", "canary", "canary - others"), build_canary_rows(answer), title=title)
        print_lines(*list_lines(answer), wraps=False)


_add_command(
    "status",
    "/admin/canary",
    "Show both variants' figures with their 95 % intervals, and what was decided on which of them.",
)
_add_command(
    "promote", "/admin/canary/promote", "Serve every new request by the canary; running ones end as they began."
)
_add_command("abort", "/admin/canary/abort", "Serve no new request by the canary; running ones end as they began.")
_add_command("restart", "/admin/canary/restart", "Forget the figures and what was decided, and begin the trial anew.")


def build_canary_rows(answer: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the table's rows: the mean of each variant, and the 95 % interval of the difference."""
    variants = [answer["arms"][name] for name in ("control", "canary")]
    control, canary = (str(variant["ttft_ms"]["requests"]) for variant in variants)
    rows = [("requests", control, canary, "")]
    for name, (title, unit, digits) in _SHOWN.items():
        control, canary = (_mean(name, variant[name], digits) for variant in variants)
        rows.append((f"{title} {unit}".strip(), control, canary, _range(answer["differences"][name], digits, sign="+")))
    return rows


def _mean(name: str, figure: dict[str, Any], digits: int) -> str:
    if figure["mean"] is None:
        return "-"
    most = 1.0 if name in ("acceptance", "agreement") else inf
    if figure["low"] is not None:  # times below 0 cannot be, nor rates above 1
        figure = {**figure, "low": max(0.0, figure["low"]), "high": min(most, figure["high"])}
    around = _range(figure, digits)
    return f"{figure['mean']:.{digits}f}" + (f" ({around})" if around else "")


def _range(interval: dict[str, Any], digits: int, sign: str = "") -> str:
    if interval["low"] is None or interval["high"] is None:
        return ""
    return f"{interval['low']:{sign}.{digits}f} to {interval['high']:{sign}.{digits}f}"


def list_lines(answer: dict[str, Any]) -> list[str]:
    """Return what stands below the table: what is tried, what was decided and why, and what comes next."""
    lines = [f"share of new requests: {answer['effective_share']:.1%} (canary.share {answer['share']:.1%})"]
    lines += [f"differs: {difference}" for difference in answer["differs"]]
    if decision := answer["decision"]:
        lines.append(f"decided {decision['at']} by the {decision['by']}: {decision['reason']}")
    lines.append(f"next: {answer['outlook']}")
    changes = answer["to_keep"] if answer["phase"] == "promoted" else []
    return lines + [f"to keep it: {change}" for change in changes]
