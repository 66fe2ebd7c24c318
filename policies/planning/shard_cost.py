"""What the parts of a model take, each on its own device: forwards, prefills, and memory of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from device_profiles.cost import bound_draft_reading
from device_profiles.link import LinkProfile
from device_profiles.profile import Exactness
from policies.planning.plan import Option, Workload

PREFILL_CHUNK_ROWS = 512
"""The most rows of a prompt in one forward. Not tuned: 64 to 512 rows run alike on llama.cpp (ADR 0109)."""
MOST_BUSY = 0.99
"""Other work that takes more of a device's time than this is counted as this. It only keeps a division finite: such a
device is a hundred times as slow."""


def stretch_cost(taken: float, utilisation: float) -> float:
    """Return how many times as long as it was measured work takes where other work takes the share `utilisation`.
    Others took the share `taken` while it was measured. How much that cost is not known (ADR 0108), so no work is
    expected to take less time than it did."""
    left = 1.0 - min(utilisation, MOST_BUSY)
    return max(1.0, (1.0 - min(taken, MOST_BUSY)) / left)


def stretch_costs(taken: NDArray[np.float64] | float, utilisation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return stretch_cost of many devices. `utilisation`: none is above MOST_BUSY."""
    return np.maximum(1.0, (1.0 - np.minimum(taken, MOST_BUSY)) / (1.0 - utilisation))


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One worker's part of a model: an option, and the share of the layers that it runs. Other work takes
    a share of the device's time."""

    option: Option
    share: float = 1.0
    utilisation: float = 0.0

    def ms(self, rows: float, sequences: float, context_tokens: float, *, changes: float = 0.0) -> float:
        """Return the time of one forward. `changes`: see StepCost.ms."""
        option = self.option
        work = self.share * option.cost.ms(rows, sequences, context_tokens, changes=changes)
        total = work + option.overhead_ms + option.overhead_sequence_ms * sequences
        return total * self._stretch

    def prefill_ms(self, tokens: int, *, beside: bool = False) -> float:
        """Return the time to prefill a prompt. `beside`: what it adds to rounds in which others decode."""
        chunks = ceil(tokens / PREFILL_CHUNK_ROWS) if not beside else 0
        work = self.share * self.option.cost.prefill_ms(tokens, chunk_rows=PREFILL_CHUNK_ROWS, beside=beside)
        return (work + chunks * self.option.overhead_ms) * self._stretch

    @property
    def _stretch(self) -> float:
        return stretch_cost(self.option.taken, self.utilisation)

    @property
    def layer_bytes(self) -> float:
        """What a forward reads of each layer's weights, as a mean over the layers."""
        return self.option.layer_bytes * self.share


def context_tokens(workload: Workload) -> float:
    """Return how much a sequence holds, on average, while it decodes."""
    return workload.prompt_tokens + workload.output_tokens / 2


class TargetTimes:
    """What a target's parts take, links apart, in whatever order they are; every figure is computed once."""

    def __init__(self, parts: Sequence[ModelPart], sequences: int, workload: Workload) -> None:
        self._parts, self._sequences, self._load = parts, sequences, workload
        self._known: dict[tuple[int, int, float], tuple[float, float, int]] = {}
        self.prefill_ms = sum(part.prefill_ms(workload.prompt_tokens) for part in parts)
        self.prefill_beside_ms = sum(part.prefill_ms(workload.prompt_tokens, beside=sequences > 1) for part in parts)

    def at(self, depth: int, micro_batches: int, changes: float = 0.0) -> tuple[float, float, int]:
        """Return the sum and the slowest of a verification of `depth` drafts, and the rows of a micro-batch."""
        key = (depth, micro_batches, changes)
        if key not in self._known:
            bit = self._load.exactness is Exactness.BIT
            sequences, context = ceil(self._sequences / micro_batches), context_tokens(self._load)
            rows = [sequences * max(depth + 1, part.option.min_rows if bit else 1) for part in self._parts]
            pairs = zip(self._parts, rows, strict=True)
            times = [part.ms(count, sequences, context, changes=changes) for part, count in pairs]
            self._known[key] = (sum(times), max(times), max(rows))
        return self._known[key]

    def verify_ms(self, hops: Sequence[LinkProfile], depth: int, micro_batches: int, *, changes: float = 0.0) -> float:
        """Return the time of a verification, with these links behind the parts. `changes`: see StepCost.ms."""
        total, slowest, rows = self.at(depth, micro_batches, changes)
        return max(total + hops_ms(hops, self._load.target.hidden_bytes * rows), micro_batches * slowest)


def micro_batch_counts(sequences: int) -> list[int]:
    """Return the numbers of micro-batches that differ in their size, ascending: the fewest of each size."""
    return sorted({ceil(sequences / count): count for count in range(sequences, 0, -1)}.values())


def hops_ms(hops: Sequence[LinkProfile], size_bytes: float) -> float:
    """Return what so many bytes take through all shards, and a token from the last back to the first."""
    return sum(link.transfer_ms(size_bytes) for link in hops[:-1]) + (hops[-1].rtt_ms / 2 if hops else 0.0)


def count_draft_reading(workload: Workload) -> int:
    """Return how many tokens of a prompt a draft model in the target's process reads (ADR 0151)."""
    most = workload.prompt_tokens
    return most if workload.drafts_read_all else min(most, bound_draft_reading(workload.output_tokens))


def kv_bytes(option: Option, workload: Workload, share: float = 1.0) -> float:
    """Return what one sequence's KV cache takes when it is at its longest."""
    return option.kv_bytes_per_token * share * (workload.prompt_tokens + workload.output_tokens)
