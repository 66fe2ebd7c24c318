"""`outrider explain`: which replica and draft a request went to, what else there was, and why not that."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from orchestrator.cli.daemon_socket import query_daemon, socket_of
from orchestrator.cli.options import AdminSocket, DaemonConfig, DaemonJson, DaemonPort


def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The answer's id, as its client sees it: chatcmpl-... or cmpl-...")
    ],
    config: DaemonConfig = None,
    port: DaemonPort = None,
    socket: AdminSocket = None,
    as_json: DaemonJson = False,
) -> None:
    """Show where a request of late went: the chosen pair of replica and draft, and all candidates with their terms."""
    answer = query_daemon(socket or socket_of(config, port), f"/admin/explain/{quote(request, safe='')}")
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    for route in answer["routes"]:
        _print_route(route, answer.get("model", ""))


def _print_route(route: dict[str, Any], model: str) -> None:
    from rich.table import Table

    from orchestrator.plain_table import add_row, wide_console

    console = wide_console()
    for line in ([f"model: {model}"] if model else []) + describe_route(route):
        console.print(line, markup=False, highlight=False)
    names = [term["name"] for term in next((one["terms"] for one in route["rated"] if one["terms"]), [])]
    table = Table("replica", "draft", "ms", *names, "why not")
    for one in route["rated"]:
        costs = [f"{term['cost_ms']:.0f}" for term in one["terms"]] or ["-"] * len(names)
        price = "-" if one["price_ms"] is None else f"{one['price_ms']:.0f}"
        add_row(table, one["name"], one["draft"] or "none", price, *costs, one["why_not"] or "chosen")
    console.print(table)


def describe_route(route: dict[str, Any]) -> list[str]:
    """Return in lines what was asked for, and what was chosen why."""
    asked = route["request"]
    line = f"{route['request_id']}, attempt {route['attempt']}, {route['age_s']:.1f} s ago: "
    line += f"{asked['prompt_tokens']} tokens of prompt, {asked['output_tokens']} expected"
    bounds = [("first token", asked["first_in_ms"]), ("end", asked["ends_in_ms"])]
    line += "".join(f", {name} within {bound:.0f} ms" for name, bound in bounds if bound is not None)
    line += "" if asked["drafts"] else ", without drafts"
    pair = f"{route['replica'] or 'nothing'} with {route['draft'] or 'no draft'}"
    return [line, f"chosen: {pair}; {route['reason']}"]
