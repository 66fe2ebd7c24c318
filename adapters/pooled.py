"""What every model over a pool of KV blocks does alike: the bookkeeping half of `adapters.contract.LoadedModel`."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import Capabilities, Segment
from adapters.kv_blocks import BlockPool
from device_profiles.profile import Exactness


def choose_min_rows(exactness: Exactness) -> int:
    """Return the fewest rows that a segment is run with where single rows are a numerical class of their own."""
    return 2 if exactness is Exactness.BIT else 1


class PooledModel:
    """The slots of a model whose KV cache is a `BlockPool`; the runtime's model derives from it."""

    capabilities: Capabilities

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def _check(self, batch: Sequence[Segment]) -> None:
        """Refuse what is beyond the capabilities. Raises Unsupported."""
        caps = self.capabilities
        self._pool.check(batch, max_rows=caps.max_batch_rows, max_context=caps.max_context_tokens)

    def count_cached_positions(self, slot: int) -> int:
        """See the contract."""
        return self._pool.count_cached_positions(slot)

    def free_blocks(self) -> int:
        """See the contract."""
        return self._pool.free

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        """See the contract."""
        return self._pool.count_needed_blocks(batch)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """See the contract."""
        return self._pool.attach(slot, tokens)

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """See the contract."""
        self._pool.share(slot, tokens)

    def release(self, slot: int) -> None:
        """See the contract."""
        if suspects := self._pool.release(slot):
            self._erase(suspects)

    def discard(self, slot: int) -> None:
        """See the contract."""
        suspects = self._pool.discard(slot)
        self.release(slot)  # what the runtime's model frees beside the pool's blocks
        if suspects:
            self._erase(suspects)

    def _erase(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros. Runtimes multiply what a mask hides by zero, and NaN stays NaN then."""
        raise NotImplementedError
