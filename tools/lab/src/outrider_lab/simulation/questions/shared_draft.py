"""For how many targets one draft worker is enough."""

from __future__ import annotations

from typing import Any

from outrider_lab.simulation.questions.answer import Answer, Plot, read_points
from outrider_lab.simulation.questions.asked import Asked, fill, place, read_row, with_places
from policies.serving.draft_pool import PoolSize

COUNTS = (1, 2, 4, 8, 16)
_SEQUENCES = 4  # of each target
_CONTEXT_TOKENS = 256.0


def answer(asked: Asked) -> Answer:
    """Return tokens/s of each target where 1 to 16 of them share one draft worker, beside no draft."""
    plain_kind, kind = with_places(asked.target, _SEQUENCES), with_places(asked.drafting_target, _SEQUENCES)
    part, host = asked.draft.part, "drafts"
    plain = read_row(asked.play(place(plain_kind, 1), fill(asked, _SEQUENCES)))
    rows: list[dict[str, Any]] = [{"targets": None, "each_tok_s": plain["output_tok_s"], **plain, "gain": 1.0}]
    for count in COUNTS:
        asked.told(f"{count} targets, one draft worker")
        pools = {asked.draft.name: PoolSize(1, 1)}
        requests = fill(asked, _SEQUENCES * count)
        result = asked.play(place(kind, count, draft_host=host, draft_pools=pools), requests)
        row = read_row(result)
        each = row["output_tok_s"] / count
        everybody = _SEQUENCES * count
        pass_ms = part.ms(everybody, everybody, _CONTEXT_TOKENS)
        gain = each / plain["output_tok_s"]
        rows.append({"targets": count, "each_tok_s": each, **row, "pass_ms": pass_ms, "gain": gain})
    plot = Plot(
        "shared-draft",
        "targets that share one draft worker",
        "tokens/s of a target over those without a draft",
        {"one draft worker": read_points(rows, "targets", "gain")},
    )
    return Answer(
        "shared-draft", "For how many targets is one draft worker enough?", _COLUMNS, rows, [plot], asked.assume()
    )


_COLUMNS = {
    "targets": "{:,}",
    "each_tok_s": "{:,.1f}",
    "tpot_ms": "{:.2f}",
    "gain": "{:.2f}",
    "drafted_a_round": "{:.2f}",
    "pass_ms": "{:.2f}",
}
