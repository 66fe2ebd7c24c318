"""What a worker expects of its rounds before it has run one, by the cost of its forwards."""

from __future__ import annotations

from typing import Final

from device_profiles.cost import StepCost
from orchestrator.protocol.ready import ExpectedRounds

_CONTEXT_TOKENS: Final = 256
_PROMPT_ROWS: Final = 64


def expect_rounds(cost: StepCost, slots: int) -> ExpectedRounds:
    """Return what rounds without drafts take, with a context of some hundred tokens, and a row of a usual prompt."""
    return ExpectedRounds(
        alone_ms=cost.ms(1, 1, _CONTEXT_TOKENS),
        full_ms=cost.ms(slots, slots, _CONTEXT_TOKENS),
        prefill_row_ms=cost.chunk_ms(_PROMPT_ROWS, 0.0, beside=False) / _PROMPT_ROWS,
    )
