"""How fast a runtime multiplies on a device: products of matrices for its arithmetic, of a matrix and a vector for its
memory. Measured through the runtime, with the threads that it will have; a runtime says how a product is made and run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from device_profiles.measured import DeviceRates, MatmulRate
from device_profiles.profile import Precision

Product = Callable[[], None]
MATRIX = 2048
"""Rows and columns of the matrices whose product is timed. Not tuned."""
VECTOR_MATRIX = (4096, 8192)
"""Of the matrix that meets a vector: in float32 it is 128 MiB, larger than caches are. Not tuned."""
# Of each product: the best run counts, so more only finds a quieter moment. Not tuned.
_TIMED_S = 0.25
_LEAST = 3  # runs: the first one warms up


@runtime_checkable
class MeasuresRates(Protocol):
    """What an adapter may have beside its contract."""

    def rates(self, device: str, threads: int) -> DeviceRates:
        """Measure a device. Raises AdapterUnavailable, Unsupported, OutOfMemory."""
        ...


def measure_rates(
    precisions: Sequence[Precision], product: Callable[[int, int, int, Precision], Product]
) -> DeviceRates:
    """Return the rates of products (rows, inner, columns, precision) that `product` makes ready to run."""
    matmul = []
    for precision in precisions:
        flops = 2.0 * MATRIX**3
        matmul.append(MatmulRate(precision, flops / _best_s(product(MATRIX, MATRIX, MATRIX, precision))))
    inner, columns = VECTOR_MATRIX
    read = 4.0 * inner * columns
    return DeviceRates(tuple(matmul), read / _best_s(product(1, inner, columns, Precision.FP32)))


def _best_s(run: Product) -> float:
    """Return the shortest time of a few: a ceiling is what nothing disturbed."""
    run()
    best, spent, count = float("inf"), 0.0, 0
    while count < _LEAST or spent < _TIMED_S:
        started = time.perf_counter()
        run()
        took = time.perf_counter() - started
        best, spent, count = min(best, took), spent + took, count + 1
    return best
