"""A decoder in graphs of fixed shape: one sequence a forward, cut into widths that there are graphs for.

The caches lie in our own memory (adapters/kv_memory.py). A sequence is one piece there, and blocks of one pool are
mapped into it. The rows that a graph returns are written in place. A rollback is a mask that ends earlier.

Exactness (docs/adr/0021-static-shapes.md): every forward of a width has the same shape, so what a row's bits could
depend on is the width and the row's place in it. Both are measured when the model is loaded, and `bit` uses only the
widths that agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from adapters.contract import (
    BlockRules,
    Capabilities,
    DeviceLost,
    ForwardResult,
    LoadOptions,
    NumericalClass,
    OutOfMemory,
    Segment,
)
from adapters.kv_blocks import BlockPool
from adapters.kv_memory import KvMemory, MappedModel
from adapters.openvino_rt.failures import FAILURES, classify_openvino_failure
from adapters.openvino_rt.static_graphs import BodyGraph, Compiler, HeadGraph, Positions, StaticPlan
from device_profiles.profile import Exactness
from device_profiles.workload import ModelSpec

Bits = NDArray[np.uint32]
# ADR 0021: one text through every width, with its rows at several places. Above the usual widths of drafts.
_SAMPLE_TOKENS = 12
# The least counts. Not tuned: widths differ by far more than runs do (ADR 0021).
_TIMED_RUNS = 3

Rows = NDArray[np.float32]


class Cover:
    """Covers rows with the cheapest widths; `cost_ms` is what a forward of each width takes (measured at load)."""

    def __init__(self, cost_ms: Mapping[int, float]) -> None:
        self._cost_ms = dict(cost_ms)
        self._best: list[tuple[float, int]] = [(0.0, 0)]  # for so many rows: the cost, and the width to begin with

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(self._cost_ms))

    def of(self, rows: int) -> list[int]:
        """Return the widths of the forwards that `rows` rows are run in, widest first; only the last has padding."""
        while len(self._best) <= rows:
            count = len(self._best)
            self._best.append(
                min((self._best[max(0, count - width)][0] + cost, width) for width, cost in self._cost_ms.items())
            )
        chosen = []
        while rows > 0:
            chosen.append(self._best[rows][1])
            rows -= chosen[-1]
        return sorted(chosen, reverse=True)


def agreeing(runs_by_width: Mapping[int, Sequence[Bits]], prefill: int) -> tuple[int, ...]:
    """Return the widths whose rows are the same to the bit: the largest such set, one with `prefill` where two are as
    large, in ascending order.

    `found[width]`: the rows of one text, computed by this width with each row at several places of the forward. A width
    that does not agree with itself is in no set; () when there is none.
    """
    steady = {
        width: runs[0] for width, runs in runs_by_width.items() if all(np.array_equal(runs[0], run) for run in runs)
    }
    classes: list[list[int]] = []
    for width, rows in steady.items():
        for known in classes:
            if np.array_equal(steady[known[0]], rows):
                known.append(width)
                break
        else:
            classes.append([width])
    best = max(classes, key=lambda widths: (len(widths), prefill in widths), default=[])
    return tuple(sorted(best))


def list_starts(length: int, count: int, width: int) -> list[tuple[int, ...]]:
    """Return where forwards of `width` may begin. The last `count` rows of a text of `length` must stand at other
    places of them each time. The last forward ends with the text."""
    begins = {length - count, max(0, length - width), max(0, length - max(count, width // 2))}
    cuts = [(begin, *range(begin + width, length, width)) for begin in sorted(begins) if begin <= length - count]
    for first in {max(1, width // 2), max(1, width - 1)} - {width}:
        begin = length - count
        cuts.append((begin, *range(begin + first, length, width)))
    return cuts


class StaticModel(MappedModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self,
        compiler: Compiler,
        spec: ModelSpec,
        options: LoadOptions,
        plan: StaticPlan,
        *,
        weights: str,
        numerical_class: NumericalClass,
        progress: Callable[[float], None],
    ) -> None:
        """Compile all widths, and measure them. Raises ModelRefused, DeviceLost, OutOfMemory."""
        cache = plan.cache
        self.spec = spec
        self._embedding = compiler.embedding
        self._positions = Positions(compiler.plan, cache.capacity)
        super().__init__(BlockPool(BlockRules(cache.blocks, cache.block, options.slots)))
        self._memory = KvMemory(
            caches=cache.caches,
            slots=options.slots,
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            block=cache.block,
            blocks=cache.blocks,
            slot_blocks=cache.capacity // cache.block,
            element_bytes=np.dtype(cache.kind).itemsize,
        )
        self.kv_layout = self._memory.layout(f"openvino static {np.dtype(cache.kind).name}")
        self._caches = [self._memory.view(slot, cache.kind) for slot in range(options.slots)]
        self._logits = np.empty((0, spec.outputs), np.float32)
        self._closed = False
        self._bodies: dict[int, BodyGraph] = {}
        self._heads: dict[int, HeadGraph] = {}
        for index, width in enumerate(plan.widths):
            self._bodies[width] = compiler.body(width)
            if width in plan.verify_rows:
                self._heads[width] = compiler.head(width)
            progress((index + 1) / len(plan.widths))
        with self._translate_failures():
            exact = self._choose_widths(plan.prefill_rows, options.exactness)
        self.capabilities = Capabilities(
            slots=options.slots,
            max_context_tokens=plan.context_tokens,
            max_batch_rows=options.max_batch_rows,
            block_tokens=cache.block,
            total_blocks=cache.blocks,
            row_invariant=exact,
            min_rows=self._cover.widths[0],
            weights=weights,
            numerical_class=replace(numerical_class, kv_cache=cache.precision, segment_rows=self._cover.widths[0]),
            exactness=options.exactness,
            device=options.device,
            static_widths=self._cover.widths,
        )

    def _choose_widths(self, prefill: int, exactness: Exactness) -> bool:
        """Keep the widths that compute the same bits, where exactness asks for that, and measure what each costs.

        Returns whether rows are invariant with what is kept: False where no width agrees with itself.
        """
        exact = exactness is Exactness.BIT
        if exact:
            rows, logits = self._sample_rows()
            self.release(0)
            bodies, heads = agreeing(_bits(rows), prefill), agreeing(_bits(logits), prefill)
            exact = bool(bodies and heads)
            if exact:
                self._bodies = {width: self._bodies[width] for width in bodies}
                self._heads = {width: self._heads[width] for width in heads}
        self._cover = Cover({width: _least_ms(self._idle_run(body)) for width, body in self._bodies.items()})
        self._head_cover = Cover({width: _least_ms(head.run) for width, head in self._heads.items()})
        return exact

    def _idle_run(self, body: BodyGraph) -> Callable[[], object]:
        return lambda: body.run(0, self._caches[0])

    def _sample_rows(self) -> tuple[dict[int, list[Rows]], dict[int, list[Rows]]]:
        """Return one text's last rows, and their logits, by every width, several times each: with the rows at other
        places of the forward. Uses slot 0 (free before, free after)."""
        widest = max(self._bodies)
        length = min(max(widest, _SAMPLE_TOKENS), self._pool.total * self._pool.block_tokens)
        count = min(length, _SAMPLE_TOKENS)
        tokens = [(7 * i * i + 11 * i + 3) % self.spec.vocabulary_size for i in range(length)]
        self._reserve([Segment(0, 0, tokens, (0, 0))])
        for start in range(0, length, widest):
            self._layers(widest, 0, start, tokens[start : start + widest])
        rows_by_width = {
            width: [self._in_pieces(tokens, starts, width)[-count:] for starts in list_starts(length, count, width)]
            for width in self._bodies
        }
        self.release(0)
        rows = rows_by_width[widest][0]
        logits = {
            width: [
                np.concatenate(
                    [self._output(width, rows[start:end]).copy() for start, end in pairwise((*starts, count))]
                )
                for starts in list_starts(count, count, width)
            ]
            for width in self._heads
        }
        return rows_by_width, logits

    def _in_pieces(self, tokens: Sequence[int], starts: Sequence[int], width: int) -> Rows:
        pieces = pairwise((*starts, len(tokens)))
        return np.concatenate([self._layers(width, 0, start, tokens[start:end]).copy() for start, end in pieces])

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        if self._closed:
            raise DeviceLost("the model was closed")
        self._check(batch)
        started = time.perf_counter()
        with self._translate_failures():
            self._reserve(batch)
            rows = np.concatenate([self._segment(segment) for segment in batch])
            logits = self._logits_of(rows)
        return ForwardResult(logits, (time.perf_counter() - started) * 1000.0)

    def _segment(self, segment: Segment) -> Rows:
        """Run a segment; returns the wanted rows as the output layer takes them."""
        done, parts = 0, []
        for width in self._cover.of(len(segment.tokens)):
            tokens = segment.tokens[done : done + width]
            rows = self._layers(width, segment.slot, segment.start + done, tokens)
            first, last = (min(max(row - done, 0), len(tokens)) for row in segment.rows)
            parts.append(rows[first:last].copy())
            done += len(tokens)
        return np.concatenate(parts)

    def _layers(self, width: int, slot: int, start: int, tokens: Sequence[int]) -> Rows:
        """Run a body over at most `width` tokens and keep their keys and values. Valid until its next run."""
        body, count = self._bodies[width], len(tokens)
        self._embedding.write(tokens, body.inputs["hidden"][0, :count])
        self._positions.write(body.inputs, start, count)
        rows = body.run(slot, self._caches[slot])
        self._caches[slot][:, :, start : start + count] = body.present[:, :, :count]
        return rows[:count]

    def _logits_of(self, rows: Rows) -> Rows:
        if len(self._logits) < len(rows):
            self._logits = np.empty((len(rows), self.spec.outputs), np.float32)
        done = 0
        for width in self._head_cover.of(len(rows)):
            part = rows[done : done + width]
            self._logits[done : done + len(part)] = self._output(width, part)
            done += len(part)
        return self._logits[:done]

    def _output(self, width: int, rows: Rows) -> Rows:
        head = self._heads[width]
        head.rows[0, : len(rows)] = rows
        return head.run()[: len(rows)]

    def _reserve(self, batch: Sequence[Segment]) -> None:
        self._pool.reserve(batch)
        for segment in batch:
            end = segment.start + len(segment.tokens)
            self._memory.place(segment.slot, self._pool.table(segment.slot, end))

    @contextmanager
    def _translate_failures(self) -> Iterator[None]:
        """Turn the runtime's failures into the contract's; the model is closed then."""
        try:
            yield
        except OutOfMemory:
            self.close()
            raise
        except FAILURES as error:
            self.close()
            raise classify_openvino_failure(error) from error

    def release(self, slot: int) -> None:
        super().release(slot)
        if not self._closed:
            self._memory.clear(slot)

    def close(self) -> None:
        self._closed = True
        self._bodies.clear()
        self._heads.clear()
        self._caches.clear()
        self._memory.close()


def _bits(runs_by_width: Mapping[int, Sequence[Rows]]) -> dict[int, list[Bits]]:
    return {width: [rows.view(np.uint32) for rows in runs] for width, runs in runs_by_width.items()}


def _least_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMED_RUNS):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1000.0)
    return min(times)
