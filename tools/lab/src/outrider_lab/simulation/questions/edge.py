"""What a draft worker at the edge is worth, by the round trip to it."""

from __future__ import annotations

from typing import Any

from device_profiles.link import LinkProfile
from outrider_lab.simulation.questions.answer import Answer, Plot, read_points
from outrider_lab.simulation.questions.asked import Asked, fill, place, read_row, with_places

RTTS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_SEQUENCES = (1, 8)
_BYTES_PER_S = 125e6  # 1 Gbit/s


def answer(asked: Asked) -> Answer:
    """Return tokens/s and TPOT by round trip, beside no draft, for one sequence and for eight at a time."""
    rows: list[dict[str, Any]] = []
    for sequences in _SEQUENCES:
        requests = fill(asked, sequences, waves=24.0 / sequences + 1)
        plain = read_row(asked.play(place(with_places(asked.target, sequences), 1), requests))
        rows.append({"sequences": sequences, "rtt_ms": None, **plain, "gain": 1.0})
        for rtt_ms in RTTS_MS:
            asked.told(f"{sequences} at a time, {rtt_ms:g} ms to the draft")
            link = LinkProfile("", "", rtt_ms, _BYTES_PER_S, "assumed")
            kind = with_places(asked.drafting_target, sequences)
            row = read_row(asked.play(place(kind, 1, draft_host="edge", links={"edge": link}), requests))
            gain = row["output_tok_s"] / plain["output_tok_s"]
            rows.append({"sequences": sequences, "rtt_ms": rtt_ms, **row, "gain": gain})
    series = {
        f"{count} at a time": read_points([row for row in rows if row["sequences"] == count], "rtt_ms", "gain")
        for count in _SEQUENCES
    }
    plot = Plot("edge", "round trip to the draft worker, ms", "tokens/s over those without a draft", series)
    return Answer("edge", "What is a draft at the edge worth?", _COLUMNS, rows, [plot], asked.assume())


_COLUMNS = {
    "sequences": "{:,}",
    "rtt_ms": "{:g}",
    "output_tok_s": "{:,.1f}",
    "tpot_ms": "{:.2f}",
    "gain": "{:.2f}",
    "drafted_a_round": "{:.2f}",
}
