"""`outrider explain`: where a request went and why, what it waited for, and what drafts brought it."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.cli.daemon_socket import name_model
from orchestrator.cli.options import ModelName
from orchestrator.cli.pool_table import print_pool
from orchestrator.plain_table import print_lines, print_table

_SHOWN_STRETCHES = 12  # what a person reads. Not tuned.


@admin_command
def explain(
    daemon: Daemon,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The answer's id, as its client sees it: chatcmpl-... or cmpl-...")
    ] = "",
    model: ModelName = None,
) -> None:
    """Show a request of late: the chosen pair of replica and draft with all candidates and their terms, what it waited
    for, how deep it was drafted for over time and what was accepted, what each drafter did, and the workers that it
    left. Without REQUEST: the groups of equal bits that serve, who goes on for whom, and what the loss of each part
    costs."""
    if not request:
        for pool in daemon.ask(name_model(model, "/admin/explain"))["models"]:
            print_lines(*([f"model: {pool['model']}"] if pool["model"] else []))
            print_pool(pool)
        return
    answer = daemon.ask(f"/admin/explain/{quote(request, safe='')}")
    for history in answer["requests"]:
        _print_history(history, answer.get("canary"))
    for route in answer["routes"]:
        _print_route(route, answer.get("model", ""))
    print_lines(*(f"{name}: {endpoint}" for name, endpoint in answer["endpoints"].items()))
    print_lines(*(f"branches of drafts on {name}: {why}" for name, why in answer["branches"].items()))


def _print_history(request: dict[str, Any], canary: dict[str, Any] | None) -> None:
    print_lines(*describe_history(request), *describe_variant(request, canary))
    _print_drafters(request)
    if not request["rounds"]:
        return
    rows = []
    for stretch in request["rounds"][-_SHOWN_STRETCHES:]:
        rounds, drafted, accepted = stretch["rounds"], stretch["drafted"], stretch["accepted"]
        rate = f"{accepted / drafted:.0%}" if drafted else "-"
        counts = (f"{stretch['at_s']:.2f} s", str(rounds), str(stretch["tokens"]))
        rows.append((*counts, f"{drafted / rounds:.1f}", f"{accepted / rounds:.1f}", rate))
    print_table(("until", "rounds", "tokens", "drafted a round", "accepted a round", "accepted"), rows)


def _print_drafters(request: dict[str, Any]) -> None:
    if not request.get("drafters"):
        return
    rows = []
    for share in request["drafters"]:
        asks, taken = f"{share['asked']} rounds", f"{share['taken']} rounds"
        proposed, tokens = f"{share['proposed']} tokens", f"{share['drafted']} tokens"
        rate = f"{share['accepted']} ({share['accepted'] / share['drafted']:.0%})" if share["drafted"] else "0"
        rows.append((share["name"], asks, proposed, taken, tokens, rate, describe_leaving(share)))
    print_table(("drafter", "asked", "proposed", "taken", "verified", "accepted", "why not more"), rows)


def describe_leaving(share: dict[str, Any]) -> str:
    reasons = {
        "a cheaper draft promised enough": share["spared"],
        "others were chosen": share["off"],
        "it had nothing that pays": share["asked"] - share["answered"],
        "another promised more": share["answered"] - share["taken"],
    }
    return ", ".join(f"{reason}: {rounds}" for reason, rounds in reasons.items() if rounds > 0) or "-"


def describe_unasked(request: dict[str, Any]) -> str:
    """Return in a line in how many rounds nobody was asked; "" where that is not known, or there was none."""
    rounds = sum(part["rounds"] for part in request["rounds"])
    most_asked = max(
        (share["asked"] + share["spared"] + share["off"] for share in request.get("drafters", [])), default=0
    )
    if not most_asked or most_asked >= rounds:
        return ""
    return f"in {rounds - most_asked} of {rounds} rounds no drafter was asked: drafts did not pay, or there was no room"


def describe_history(request: dict[str, Any]) -> list[str]:
    ended, took_s = request["state"], request["took_s"]
    if took_s is not None:
        ended = f"ended after {took_s:.2f} s ({request['outcome']})"
    whose = f", key {request['key']}" if request["key"] else ""
    counts = f"{request['tokens']} tokens behind {request['prompt_tokens']} of prompt{whose}"
    lines = [f"{request['request_id']}: {ended}, {counts}"]
    first = "" if request["first_token_ms"] is None else f", first token after {request['first_token_ms']:.0f} ms"
    lines.append(f"queue {request['queue_ms']:.0f} ms, prefill {request['prefill_ms']:.0f} ms{first}")
    drafted, accepted, rounds = (
        sum(part[name] for part in request["rounds"]) for name in ("drafted", "accepted", "rounds")
    )
    if drafted:
        lines.append(f"drafts: {drafted} tokens in {rounds} rounds, {accepted} accepted ({accepted / drafted:.0%})")
    if request["branches"]:
        lines.append(f"branches: {request['branches']} verified beside drafts, {request['branches_taken']} taken")
    if request["prediction_tokens"]:
        lines.append(describe_prediction(request))
    if request["other_bits_from"]:
        tokens = ", ".join(map(str, request["other_bits_from"]))
        lines.append(f"bits: from token {tokens} on they are another group's (counted from 0)")
    if request["tolerated"]:
        share = request["tolerated"] / max(1, request["tokens"])
        lines.append(f"tolerance: {request['tolerated']} tokens ({share:.1%}) are not the target's own choice")
    if unasked := describe_unasked(request):
        lines.append(unasked)
    lines += [f"left {move['replica']} after {move['at_s']:.2f} s: {move['why']}" for move in request["moves"]]
    return lines


def describe_variant(request: dict[str, Any], canary: dict[str, Any] | None) -> list[str]:
    """Return in a line which variant of a canary served a request, and how the trial stands; nothing without one."""
    if canary is None or not request["variant"]:
        return []
    stands = f"{canary['phase'].replace('_', ' ')} {canary['reason']}" if canary["reason"] else canary["outlook"]
    return [f"variant: {request['variant']}; the canary's trial: {stands}"]


def describe_prediction(request: dict[str, Any]) -> str:
    verified, right = request["predicted"], request["predicted_right"]
    share = f" ({right / request['tokens']:.0%} of the output)" if request["tokens"] else ""
    return f"prediction: {request['prediction_tokens']} tokens, {verified} of them verified, {right} accepted{share}"


def _print_route(route: dict[str, Any], model: str) -> None:
    print_lines(*([f"model: {model}"] if model else []), *describe_route(route))
    names = [
        term["name"] for term in next((candidate["terms"] for candidate in route["rated"] if candidate["terms"]), [])
    ]
    rows = []
    for candidate in route["rated"]:
        costs = [f"{term['cost_ms']:.0f}" for term in candidate["terms"]] or ["-"] * len(names)
        price = "-" if candidate["price_ms"] is None else f"{candidate['price_ms']:.0f}"
        rows.append((candidate["name"], candidate["draft"] or "none", price, *costs, candidate["why_not"] or "chosen"))
    print_table(("replica", "draft", "ms", *names, "why not"), rows)


def describe_route(route: dict[str, Any]) -> list[str]:
    request = route["request"]
    line = f"{route['request_id']}, attempt {route['attempt']}, {route['age_s']:.1f} s ago: "
    line += f"{request['prompt_tokens']} tokens of prompt, {request['output_tokens']} expected"
    bounds = [("first token", request["first_in_ms"]), ("end", request["ends_in_ms"])]
    line += "".join(f", {name} within {bound:.0f} ms" for name, bound in bounds if bound is not None)
    line += "" if request["drafts"] else ", without drafts"
    pair = f"{route['replica'] or 'nothing'} with {route['draft'] or 'no draft'}"
    return [line, f"chosen: {pair}; {route['reason']}"]
