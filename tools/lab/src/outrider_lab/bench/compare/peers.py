"""Outrider beside the best mode of each other engine: ratios of the ratios that both have to Outrider's plain mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_lab.bench.compare.figures import CONTROL, OUTRIDER, PLAIN, RATIOS, SPECULATIVE


def compare_with_peers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each mode of Outrider and each other engine, how many times that engine's best mode it is.

    `best` names that mode for each rate; `categories` are ratios of tokens/s to the mode with the most over all
    prompts. A rate that one of both lacks is left out."""
    measured = [row for row in rows if row.get("vs_outrider")]
    ours = [row for row in measured if row["engine"] == OUTRIDER and row["mode"] != CONTROL]
    engines = list(dict.fromkeys(row["engine"] for row in measured if row["engine"] != OUTRIDER))
    return [
        {"mode": own["mode"], "engine": engine, **_compare(own, [row for row in measured if row["engine"] == engine])}
        for engine in engines
        for own in ours
    ]


def summarise_beside(
    rows: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]], at_once: int
) -> dict[str, Any]:
    """Return how Outrider as configured stands beside the best of all other engines, `beside` being of
    `compare_with_peers`. What was not measured is left out."""
    modes = {row["mode"]: row for row in rows if row["engine"] == OUTRIDER and row.get("vs_outrider")}
    mode = SPECULATIVE if SPECULATIVE in modes else PLAIN
    own = [row for row in beside if row["mode"] == mode]
    keys = {
        "tok_s": "vs_best_peer_1",
        "at_once_tok_s": f"vs_best_peer_{at_once}",
        "tpot": "tpot_vs_best_peer",
        "ttft": "ttft_vs_best_peer",
    }
    figures: dict[str, Any] = {
        key: min(row[rate] for row in own if rate in row)
        for rate, key in keys.items()
        if any(rate in row for row in own)
    }
    plains = [row for row in rows if row["mode"] == PLAIN and row["engine"] != OUTRIDER and row.get("vs_outrider")]
    if tpots := [row["vs_outrider"]["tpot"] for row in plains if "tpot" in row["vs_outrider"]]:
        figures["plain_tpot_to_peer"] = max(tpots)  # their rate over ours is our time over theirs
    rated = [row for row in own if row["categories"]]
    if rated:
        figures["worst_category_vs_peer"] = min(min(rated, key=lambda row: float(row["tok_s"]))["categories"].values())
    if mode == SPECULATIVE:
        speculative = modes[mode]
        figures["identical"] = speculative["same_as_plain"] == 1.0 and speculative["same_in_company"] in (1.0, None)
        if together := speculative["vs_outrider"].get("at_once_tok_s"):
            figures[f"drafts_vs_plain_{at_once}"] = together
    return figures


def _compare(own: Mapping[str, Any], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"best": {}, "categories": {}}
    for name in RATIOS:
        rated = [row for row in theirs if row["vs_outrider"].get(name)]
        if not rated or not own["vs_outrider"].get(name):
            continue
        best = max(rated, key=lambda row: float(row["vs_outrider"][name]))
        found[name] = own["vs_outrider"][name] / best["vs_outrider"][name]
        found["best"][name] = best["mode"]
        if name == "tok_s":
            found["categories"] = _compare_categories(own["categories"], best["categories"])
    return found


def _compare_categories(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    pairs = {
        name: (own[name].get("tok_s_vs_outrider"), theirs[name].get("tok_s_vs_outrider"))
        for name in own
        if name in theirs
    }
    return {name: ours / other for name, (ours, other) in pairs.items() if ours and other}
