"""What bounds a role on a device: its memory, from which every forward reads the weights, or its arithmetic.

The roofline of Williams, Waterman and Patterson (Communications of the ACM 52, 2009): a forward of n rows takes
max(bytes / bandwidth, n x operations / rate); a row takes 2 operations for each element of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from device_profiles.units import MS_PER_S


@dataclass(frozen=True, slots=True)
class Roofline:
    """The verdict at so many rows: what bounds them, and from how many on it is arithmetic. A target that decodes one
    sequence at depth k has k + 1 rows: `turns_at_depth` is the first depth whose drafts are no longer free.
    `least_ms`: no forward of these rows can be faster."""

    bound: Literal["memory", "compute"]
    rows: float
    turns_at_rows: float
    least_ms: float

    @property
    def turns_at_depth(self) -> int:
        """Drafts of one sequence with which a verification is bound by arithmetic."""
        return max(0, int(self.turns_at_rows))


def roofline(
    *, read_bytes: float, matrix_elements: float, flops: float, bandwidth_bytes_per_s: float, rows: float = 1.0
) -> Roofline:
    """Return what bounds a forward of `rows` rows. `read_bytes`: of weights and KV cache in each forward; `flops`: in
    the format that it computes in. Raises ValueError where a figure is not positive."""
    figures = (read_bytes, matrix_elements, flops, bandwidth_bytes_per_s, rows)
    if min(figures) <= 0.0:
        raise ValueError(f"a roofline needs positive figures, not {figures}")
    memory_s = read_bytes / bandwidth_bytes_per_s
    row_s = 2.0 * matrix_elements / flops
    turns = memory_s / row_s
    return Roofline(
        bound="memory" if rows <= turns else "compute",
        rows=rows,
        turns_at_rows=turns,
        least_ms=max(memory_s, rows * row_s) * MS_PER_S,
    )
