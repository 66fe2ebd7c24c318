"""A mixed-integer program, written down column by column and row by row, and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import inf

import numpy as np

_GAP = 1e-4  # relative; how closely an optimum is proven
_SECONDS = 120.0
_INFEASIBLE = 2  # scipy.optimize.milp's status


@dataclass(slots=True)
class Program:
    """Minimises the sum of cost times column under rows of the form low <= sum <= high. Columns are named by any value,
    and not negative."""

    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _upper: list[float] = field(default_factory=list)
    _integer: list[bool] = field(default_factory=list)
    _cost: dict[int, float] = field(default_factory=dict)
    _rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, name: Hashable, upper: float = 1.0, *, integer: bool = True) -> int:
        """Return a column's number; it is made when it is first named."""
        if name not in self._numbers:
            self._numbers[name] = len(self._upper)
            self._upper.append(upper)
            self._integer.append(integer)
        return self._numbers[name]

    def row(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """Add low <= sum of factor times column <= high."""
        factors: dict[int, float] = {}
        for column, factor in entries:
            factors[column] = factors.get(column, 0.0) + factor
        self._rows.append((factors, low, high))

    def cost(self, column: int, factor: float) -> None:
        """Add to what is minimised."""
        self._cost[column] = self._cost.get(column, 0.0) + factor

    def below(self, most: float) -> None:
        """Look for nothing that costs more."""
        self._rows.append((dict(self._cost), -inf, most))

    def least_cost(self) -> float | None:
        """Return the least cost, None where there is no solution.

        Raises RuntimeError where the solver gives up.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # here: few tests need it
        from scipy.sparse import csr_array

        cost = np.zeros(len(self._upper))
        cost[list(self._cost)] = list(self._cost.values())
        entries = [
            (row, column, factor) for row, (known, _, _) in enumerate(self._rows) for column, factor in known.items()
        ]
        rows, columns, factors = (np.array(part) for part in zip(*entries, strict=True))
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._rows), len(self._upper)))
        low, high = ([row[side] for row in self._rows] for side in (1, 2))
        found = milp(
            cost,
            integrality=np.array(self._integer, int),
            bounds=Bounds(0.0, np.array(self._upper)),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
        if found.status == _INFEASIBLE:
            return None
        if found.x is None or not found.success:
            raise RuntimeError(f"the exact solver gave up: {found.message}")
        return float(found.fun)
