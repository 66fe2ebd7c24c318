"""A model over ranges of its layers, each loaded on a device of its own: what one gives the next one reads.

All ranges keep the same slots, in KV caches of their own. So every call about a slot goes to all of them, and a forward
goes through them in order. What one of them would refuse is found out before any is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from adapters.contract import (
    Capabilities,
    CapacityError,
    DeviceLost,
    ForkableKv,
    ForwardResult,
    Hidden,
    LoadedShard,
    OutOfMemory,
    Segment,
    ShardResult,
    Unsupported,
)
from device_profiles.units import ceil_div


class PipelineModel:
    """See the module and `adapters.contract.LoadedModel`. One thread calls it."""

    def __init__(self, shards: Sequence[LoadedShard]) -> None:
        """`shards` are in the order of their layers. Raises Unsupported where they are not all layers of one model."""
        self.shards = tuple(shards)
        _check_shards(self.shards)
        self.spec = replace(shards[0].spec, bytes_per_token=sum(one.spec.bytes_per_token for one in shards))
        self.capabilities = _join_capabilities([one.capabilities for one in shards])

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        for shard in self.shards:
            if shard.count_needed_blocks(batch) > shard.free_blocks():
                raise CapacityError(f"{shard.layers}: no KV blocks are left for this forward")
        first, *rest = self.shards
        found = self._forward_layers(first, batch, None)
        device_ms = found.device_ms
        for shard in rest:
            found = self._forward_layers(shard, batch, found.output)
            device_ms += found.device_ms
        return ForwardResult(found.output, device_ms)

    def _forward_layers(self, shard: LoadedShard, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        """Run one range; where its device is lost, the model is."""
        try:
            return shard.forward_layers(batch, hidden)
        except DeviceLost as error:
            if not (isinstance(error, OutOfMemory) and error.can_go_on):
                self.close()
            raise

    def count_cached_positions(self, slot: int) -> int:
        """See the contract."""
        return min(shard.count_cached_positions(slot) for shard in self.shards)

    def free_blocks(self) -> int:
        """See the contract. Blocks are of `capabilities.block_tokens`."""
        unit = self.capabilities.block_tokens
        return min(shard.free_blocks() * shard.capabilities.block_tokens // unit for shard in self.shards)

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        """See the contract. Blocks are of `capabilities.block_tokens`."""
        unit = self.capabilities.block_tokens
        return max(
            ceil_div(shard.count_needed_blocks(batch) * shard.capabilities.block_tokens, unit) for shard in self.shards
        )

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """See the contract. Ranges that remember different lengths begin with the shortest."""
        held = [shard.attach(slot, tokens) for shard in self.shards]
        common = min(held)
        if any(one != common for one in held):
            self.release(slot)
            held = [shard.attach(slot, tokens[: common + 1]) if common else 0 for shard in self.shards]
            if any(one != held[0] for one in held):
                self.release(slot)
                return 0
        return held[0]

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """See the contract."""
        for shard in self.shards:
            shard.share(slot, tokens)

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        """See the contract."""
        done: list[LoadedShard] = []
        try:
            for shard in self.shards:
                if not isinstance(shard, ForkableKv):
                    raise Unsupported(f"{shard.layers}: sequences cannot go on in several ways there")
                shard.fork(slot, source, positions, shared)
                done.append(shard)
        except (CapacityError, Unsupported):
            for shard in done:
                shard.release(slot)
            raise

    def release(self, slot: int) -> None:
        """See the contract."""
        for shard in self.shards:
            shard.release(slot)

    def discard(self, slot: int) -> None:
        """See the contract."""
        for shard in self.shards:
            shard.discard(slot)

    def close(self) -> None:
        """See the contract."""
        for shard in self.shards:
            shard.close()


def _check_shards(shards: Sequence[LoadedShard]) -> None:
    """Raises Unsupported where they do not make one model."""
    layers, whole = [one.layers for one in shards], shards[0].spec.layers
    if layers[0].first or layers[-1].end != whole or any(left.end != right.first for left, right in pairwise(layers)):
        raise Unsupported(f"{', '.join(map(str, layers))} are not the {whole} layers of the model, one after the other")
    vocabularies = {(one.spec.vocabulary_fingerprint, one.spec.outputs) for one in shards}
    if len(vocabularies) > 1:
        raise Unsupported("the shards are of models with other vocabularies")


def _join_capabilities(all_of: Sequence[Capabilities]) -> Capabilities:
    """Return what all of them can do, in the first one's formats. Rows are run apart only as far as all do so."""
    first = all_of[0]
    block_tokens = max(one.block_tokens for one in all_of)
    if any(block_tokens % one.block_tokens for one in all_of):
        raise Unsupported(f"the shards' KV blocks of {', '.join(str(one.block_tokens) for one in all_of)} do not fit")
    return replace(
        first,
        slots=min(one.slots for one in all_of),
        max_context_tokens=min(one.max_context_tokens for one in all_of),
        max_batch_rows=min(one.max_batch_rows for one in all_of),
        block_tokens=block_tokens,
        total_blocks=min(one.total_blocks * one.block_tokens // block_tokens for one in all_of),
        row_invariant=all(one.row_invariant for one in all_of),
        paid_rows=max(one.paid_rows for one in all_of),
        weights=" + ".join(dict.fromkeys(one.weights for one in all_of)),
        device="+".join(one.device for one in all_of),
        apart_tokens=min(one.apart_tokens for one in all_of),
    )
