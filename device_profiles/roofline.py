"""What bounds a role on a device: its memory, from which every forward reads the weights, or its arithmetic.

The roofline of Williams, Waterman and Patterson (Communications of the ACM 52, 2009): a forward of n rows takes
max(bytes / bandwidth, n x operations / rate). A row takes 2 operations for each element of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Roofline:
    """The verdict: from how many rows on arithmetic bounds a forward. A target that decodes one sequence at depth k has
    k + 1 rows: `turns_at_depth` is the first depth whose drafts are no longer free."""

    turns_at_rows: float

    @property
    def bound(self) -> Literal["memory", "compute"]:
        return "memory" if self.turns_at_rows >= 1.0 else "compute"

    @property
    def turns_at_depth(self) -> int:
        """Drafts of one sequence with which a verification is bound by arithmetic."""
        return max(0, int(self.turns_at_rows))


def roofline(*, read_bytes: float, matrix_elements: float, flops: float, bandwidth_bytes_per_s: float) -> Roofline:
    """Return what bounds a model's forwards. `read_bytes`: of weights and KV cache in each forward; `flops`: in the
    format that it computes in. Raises ValueError where a figure is not positive."""
    figures = (read_bytes, matrix_elements, flops, bandwidth_bytes_per_s)
    if min(figures) <= 0.0:
        raise ValueError(f"a roofline needs positive figures, not {figures}")
    return Roofline((read_bytes / bandwidth_bytes_per_s) / (2.0 * matrix_elements / flops))
