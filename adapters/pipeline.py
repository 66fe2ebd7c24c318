"""A model over ranges of its layers, each loaded on a device of its own: what one gives the next one reads.

All ranges keep the same slots, in KV caches of their own. So every call about a slot goes to all of them, and a
forward goes through them in order. What one of them would refuse is found out before any is called. Each has a thread
of its own (`adapters.stage`): while one runs a forward, those before it can run the next ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise

from adapters.contract import (
    Capabilities,
    CapacityError,
    CountedShard,
    DeviceLost,
    ForwardResult,
    OutOfMemory,
    PendingForward,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.stage import Stage
from device_profiles.units import MS_PER_S, ceil_div

OnForward = Callable[[Sequence[Segment], Sequence[float], float], None]
"""Called with a batch, what each range took of it by its runtime, and what all of it took, in ms."""


class PipelineModel:
    """See the module and `adapters.contract.LoadedModel` and `StagedModel`. One thread calls it."""

    def __init__(self, shards: Sequence[CountedShard], watch: OnForward | None = None) -> None:
        """`shards` are in the order of their layers. `watch` hears of every forward. Layers may be missing then, as
        costs alone count. Raises Unsupported where they are not all layers of one model."""
        self.shards = tuple(shards)
        self._watch = watch
        _check_shards(self.shards, gaps=watch is not None)
        self.spec = replace(shards[0].spec, bytes_per_token=sum(shard.spec.bytes_per_token for shard in shards))
        self.capabilities = _join_capabilities([shard.capabilities for shard in shards])
        self._stages = [Stage(shard) for shard in shards]

    @property
    def stages(self) -> int:
        return len(self._stages)

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        began_s = time.perf_counter()
        result = self.start_forward(batch).result()
        if self._watch is not None:
            self._watch(batch, result.stage_ms, MS_PER_S * (time.perf_counter() - began_s))
        return result

    def start_forward(self, batch: Sequence[Segment]) -> PendingForward:
        inner = [replace(segment, best=0, temperature=0.0) if segment.best else segment for segment in batch]
        batches = [inner] * (self.stages - 1) + [batch]  # it is the last one that has logits
        for stage, its in zip(self._stages, batches, strict=True):
            stage.check(its)
        for stage in self._stages:
            if stage.count_needed_blocks(batch) > stage.free_blocks():
                raise CapacityError(f"{stage.layers}: no KV blocks are left for this forward")
        results: list[Future[ShardResult]] = []
        for stage, its in zip(self._stages, batches, strict=True):
            results.append(stage.start(its, results[-1] if results else None))
        return _Started(self, results)

    def count_cached_positions(self, slot: int) -> int:
        return min(stage.count_cached_positions(slot) for stage in self._stages)

    def free_blocks(self) -> int:
        """Blocks are of `capabilities.block_tokens`."""
        unit = self.capabilities.block_tokens
        return min(stage.free_blocks() * stage.capabilities.block_tokens // unit for stage in self._stages)

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        """Blocks are of `capabilities.block_tokens`."""
        unit = self.capabilities.block_tokens
        return max(
            ceil_div(stage.count_needed_blocks(batch) * stage.capabilities.block_tokens, unit) for stage in self._stages
        )

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """Ranges that remember different lengths begin with the shortest."""
        held = [stage.attach(slot, tokens) for stage in self._stages]
        common = min(held)
        if any(count != common for count in held):
            self.release(slot)
            held = [stage.attach(slot, tokens[: common + 1]) if common else 0 for stage in self._stages]
            if any(count != held[0] for count in held):
                self.release(slot)
                return 0
        return held[0]

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        for stage in self._stages:
            stage.share(slot, tokens)

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        done: list[Stage] = []
        try:
            for stage in self._stages:
                stage.fork(slot, source, positions, shared)
                done.append(stage)
        except (CapacityError, Unsupported):
            for stage in done:
                stage.release(slot)
            raise

    def release(self, slot: int) -> None:
        for stage in self._stages:
            stage.release(slot)

    def discard(self, slot: int) -> None:
        for stage in self._stages:
            stage.discard(slot)

    def close(self) -> None:
        for stage in self._stages:
            stage.close()


@dataclass(frozen=True, slots=True)
class _Started:
    """A forward that went through, or is on its way through, all stages; `results`: of each."""

    model: PipelineModel
    results: list[Future[ShardResult]]

    def result(self) -> ForwardResult:
        """Where a stage's device is lost, the model is."""
        try:
            # What fails in one stage fails in all behind it. To wait for each would wake this thread once for each, and
            # have it contend with the threads of stages.
            last = self.results[-1].result()
            results = [*(pending.result() for pending in self.results[:-1]), last]
        except DeviceLost as error:
            if not (isinstance(error, OutOfMemory) and error.can_go_on):
                self.model.close()
            raise
        stage_ms = tuple(result.device_ms for result in results)
        return ForwardResult(last.output, sum(stage_ms), stage_ms, last.best)


def _check_shards(shards: Sequence[CountedShard], *, gaps: bool) -> None:
    """Raises Unsupported where they do not make one model."""
    layers, whole = [shard.layers for shard in shards], shards[0].spec.layers
    broken = any(left.end > right.first if gaps else left.end != right.first for left, right in pairwise(layers))
    if layers[0].first or layers[-1].end != whole or broken:
        raise Unsupported(f"{', '.join(map(str, layers))} are not the {whole} layers of the model, one after the other")
    vocabularies = {(shard.spec.vocabulary_fingerprint, shard.spec.outputs) for shard in shards}
    if len(vocabularies) > 1:
        raise Unsupported("the shards are of models with other vocabularies")


def _join_capabilities(all_of: Sequence[Capabilities]) -> Capabilities:
    """Return what all of them can do, in the first one's formats. Rows are run apart only as far as all do so."""
    first = all_of[0]
    block_tokens = max(shard.block_tokens for shard in all_of)
    if any(block_tokens % shard.block_tokens for shard in all_of):
        raise Unsupported(
            f"the shards' KV blocks of {', '.join(str(shard.block_tokens) for shard in all_of)} do not fit"
        )
    return replace(
        first,
        slots=min(shard.slots for shard in all_of),
        max_context_tokens=min(shard.max_context_tokens for shard in all_of),
        max_batch_rows=min(shard.max_batch_rows for shard in all_of),
        block_tokens=block_tokens,
        total_blocks=min(shard.total_blocks * shard.block_tokens // block_tokens for shard in all_of),
        row_invariant=all(shard.row_invariant for shard in all_of),
        best_logits=all_of[-1].best_logits,
        min_rows=max(shard.min_rows for shard in all_of),
        weights=" + ".join(dict.fromkeys(shard.weights for shard in all_of)),
        device="+".join(shard.device for shard in all_of),
        apart_tokens=min(shard.apart_tokens for shard in all_of),
    )
