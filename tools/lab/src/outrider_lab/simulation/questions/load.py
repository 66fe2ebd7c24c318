"""Where speculation stops paying as load rises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider_lab.simulation.questions.answer import Answer, Plot, read_points
from outrider_lab.simulation.questions.asked import Asked, fill, make, place, read_row, with_places

SHARES = (0.1, 0.5, 1.0, 1.5, 2.0, 3.0)
_REQUESTS = 960
_PLACES = 128
_SLOWER = 1.5  # the objective of TPOT: so many times that of a lone sequence without drafts
_TTFT_MS = 1000.0


def answer(asked: Asked) -> Answer:
    """Return TPOT, tokens/s, goodput and the depth by rate, with drafts from the text and without."""
    kinds = {"plain": with_places(asked.target, _PLACES), "drafts": with_places(asked.suffix, _PLACES)}
    asked.told("what it makes at most")
    full = asked.play(place(kinds["plain"], 1), fill(asked, _PLACES, waves=6))["summary"]
    most = full["requests_per_s"]
    alone = read_row(asked.play(place(replace(asked.target, places=1), 1), fill(asked, 1)))
    slo = {"ttft_ms": _TTFT_MS, "tpot_ms": _SLOWER * alone["tpot_ms"]}
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        rate = share * most
        requests = make(asked, rate, max(4, _REQUESTS * asked.share) / rate, seed=2)
        for name, kind in kinds.items():
            asked.told(f"{rate:.2f} requests/s, {name}")
            row = read_row(asked.play(place(kind, 1), requests, slo=slo))
            rows.append({"rate": rate, "load": share, "way": name, **row})
    plots = [
        Plot(
            f"load-{key.split('_')[0]}",
            "requests/s",
            label,
            {name: read_points([row for row in rows if row["way"] == name], "rate", key) for name in kinds},
        )
        for key, label in (("tpot_ms", "median TPOT, ms"), ("drafted_a_round", "draft tokens a sequence and round"))
    ]
    told = [*asked.assume(), f"objectives: TTFT {_TTFT_MS:.0f} ms, TPOT {slo['tpot_ms']:.1f} ms"]
    return Answer("load", "Where does speculation stop paying as load rises?", _COLUMNS, rows, plots, told)


_COLUMNS = {
    "rate": "{:.2f}",
    "load": "{:.0%}",
    "way": "{}",
    "output_tok_s": "{:,.1f}",
    "tpot_ms": "{:.2f}",
    "ttft_ms": "{:,.0f}",
    "goodput_per_s": "{:.2f}",
    "attainment": "{:.1%}",
    "drafted_a_round": "{:.2f}",
}
