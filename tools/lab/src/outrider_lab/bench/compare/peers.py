"""Outrider beside the best mode of each other engine: ratios of the ratios that both have to Outrider's plain mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_lab.bench.compare.figures import CONTROL, OUTRIDER, RATIOS


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
