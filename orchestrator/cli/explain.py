"""`outrider explain`: where a request went and why, what it waited for, and what drafts brought it."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from orchestrator.cli.admin_command import Daemon, admin_command
from orchestrator.plain_table import print_lines, print_table

_SHOWN_STRETCHES = 12


@admin_command
def explain(
    daemon: Daemon,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The answer's id, as its client sees it: chatcmpl-... or cmpl-...")
    ],
) -> None:
    """Show a request of late: the chosen pair of replica and draft with all candidates and their terms, what it waited
    for, how deep it was drafted for over time and what was accepted, what each drafter did, and the workers that it
    left."""
    answer = daemon.ask(f"/admin/explain/{quote(request, safe='')}")
    for one in answer["requests"]:
        _print_history(one, answer.get("canary"))
    for route in answer["routes"]:
        _print_route(route, answer.get("model", ""))


def _print_history(one: dict[str, Any], canary: dict[str, Any] | None) -> None:
    print_lines(*describe_history(one), *describe_variant(one, canary))
    _print_drafters(one)
    if not one["rounds"]:
        return
    rows = []
    for stretch in one["rounds"][-_SHOWN_STRETCHES:]:
        rounds, drafted, accepted = stretch["rounds"], stretch["drafted"], stretch["accepted"]
        rate = f"{accepted / drafted:.0%}" if drafted else "-"
        counts = (f"{stretch['at_s']:.2f} s", str(rounds), str(stretch["tokens"]))
        rows.append((*counts, f"{drafted / rounds:.1f}", f"{accepted / rounds:.1f}", rate))
    print_table(("until", "rounds", "tokens", "drafted a round", "accepted a round", "accepted"), rows)


def _print_drafters(one: dict[str, Any]) -> None:
    if not one.get("drafters"):
        return
    rows = []
    for share in one["drafters"]:
        asked, taken = f"{share['asked']} rounds", f"{share['taken']} rounds"
        proposed, tokens = f"{share['proposed']} tokens", f"{share['drafted']} tokens"
        rate = f"{share['accepted']} ({share['accepted'] / share['drafted']:.0%})" if share["drafted"] else "0"
        rows.append((share["name"], asked, proposed, taken, tokens, rate, describe_leaving(share)))
    print_table(("drafter", "asked", "proposed", "taken", "verified", "accepted", "why not more"), rows)


def describe_leaving(share: dict[str, Any]) -> str:
    """Return why a drafter was left alone, or its draft was not taken, in so many rounds each."""
    reasons = {
        "a cheaper draft promised enough": share["spared"],
        "others were chosen": share["off"],
        "it had nothing that pays": share["asked"] - share["answered"],
        "another promised more": share["answered"] - share["taken"],
    }
    return ", ".join(f"{reason}: {rounds}" for reason, rounds in reasons.items() if rounds > 0) or "-"


def describe_unasked(one: dict[str, Any]) -> str:
    """Return in a line in how many rounds nobody was asked; "" where that is not known, or there was none."""
    rounds = sum(part["rounds"] for part in one["rounds"])
    asked = max((share["asked"] + share["spared"] + share["off"] for share in one.get("drafters", [])), default=0)
    if not asked or asked >= rounds:
        return ""
    return f"in {rounds - asked} of {rounds} rounds no drafter was asked: drafts did not pay, or there was no room"


def describe_history(one: dict[str, Any]) -> list[str]:
    """Return in lines what became of a request."""
    ended = f"ended after {one['took_s']:.2f} s ({one['outcome']})" if one["took_s"] is not None else one["state"]
    whose = f", key {one['key']}" if one["key"] else ""
    lines = [f"{one['request_id']}: {ended}, {one['tokens']} tokens behind {one['prompt_tokens']} of prompt{whose}"]
    first = "" if one["first_token_ms"] is None else f", first token after {one['first_token_ms']:.0f} ms"
    lines.append(f"queue {one['queue_ms']:.0f} ms, prefill {one['prefill_ms']:.0f} ms{first}")
    drafted, accepted, rounds = (
        sum(part[name] for part in one["rounds"]) for name in ("drafted", "accepted", "rounds")
    )
    if drafted:
        lines.append(f"drafts: {drafted} tokens in {rounds} rounds, {accepted} accepted ({accepted / drafted:.0%})")
    if one["prediction_tokens"]:
        lines.append(describe_prediction(one))
    if one["tolerated"]:
        share = one["tolerated"] / max(1, one["tokens"])
        lines.append(f"tolerance: {one['tolerated']} tokens ({share:.1%}) are not the target's own choice")
    if unasked := describe_unasked(one):
        lines.append(unasked)
    lines += [f"left {move['replica']} after {move['at_s']:.2f} s: {move['why']}" for move in one["moves"]]
    return lines


def describe_variant(one: dict[str, Any], canary: dict[str, Any] | None) -> list[str]:
    """Return in a line which variant of a canary served a request, and how the trial stands; nothing without one."""
    if canary is None or not one["lane"]:
        return []
    stands = f"{canary['phase'].replace('_', ' ')} {canary['reason']}" if canary["reason"] else canary["outlook"]
    return [f"variant: {one['lane']}; the canary's trial: {stands}"]


def describe_prediction(one: dict[str, Any]) -> str:
    """Return in a line what the request's own prediction brought."""
    verified, right = one["predicted"], one["predicted_right"]
    share = f" ({right / one['tokens']:.0%} of the output)" if one["tokens"] else ""
    return f"prediction: {one['prediction_tokens']} tokens, {verified} of them verified, {right} accepted{share}"


def _print_route(route: dict[str, Any], model: str) -> None:
    print_lines(*([f"model: {model}"] if model else []), *describe_route(route))
    names = [term["name"] for term in next((one["terms"] for one in route["rated"] if one["terms"]), [])]
    rows = []
    for one in route["rated"]:
        costs = [f"{term['cost_ms']:.0f}" for term in one["terms"]] or ["-"] * len(names)
        price = "-" if one["price_ms"] is None else f"{one['price_ms']:.0f}"
        rows.append((one["name"], one["draft"] or "none", price, *costs, one["why_not"] or "chosen"))
    print_table(("replica", "draft", "ms", *names, "why not"), rows)


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
