"""A table of depths by batch size, as in vLLM (`num_speculative_tokens` per batch size, vllm-project/vllm#32374).

The table is the operator's to measure; here it is made of the true costs at an assumed acceptance, which is
kinder to it than most operators are.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider_lab.replay.fixed import FixedDepth
from outrider_lab.replay.fixed_rates import cap, curve
from outrider_lab.replay.recorded import Costs
from policies.speculation import RoundContext, RoundSequence
from policies.speculation.cost_model import start_cost_model

ASSUMED_ACCEPTANCE = 0.7


def table_of(costs: Costs, *, most: int, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> tuple[tuple[int, int], ...]:
    """Return (batch size, depth) for batches from that size up, at ASSUMED_ACCEPTANCE and no context."""
    cost = start_cost_model(costs.forward)
    return tuple(
        (
            size,
            cap(
                curve(
                    (ASSUMED_ACCEPTANCE,),
                    cost,
                    sequences=size,
                    context_tokens=0.0,
                    most=most,
                    min_rows=costs.paid_rows,
                )
            ),
        )
        for size in sizes
    )


class BatchTable(FixedDepth):
    """Looks the depth of all sequences up by how many there are."""

    def __init__(self, table: Sequence[tuple[int, int]]) -> None:
        super().__init__(0, name="batch-table")
        self._table = tuple(table)

    def depth_of(self, now: RoundContext, place: RoundSequence) -> int:
        """See FixedDepth."""
        depth = self._table[0][1]
        for size, found in self._table:
            if len(now.places) >= size:
                depth = found
        return depth
