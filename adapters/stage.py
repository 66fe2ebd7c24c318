"""One stage of a pipeline: a range of layers, and the thread that calls it in order while others go on.

A stage keeps a copy of its shard's bookkeeping (`BlockRules`). So calls about slots are answered at once, as if all
that was started before had ended, and the shard itself is told behind it. All stages of a pipeline are told the same
calls in the same order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from adapters.contract import (
    AdapterError,
    CountedShard,
    DeviceLost,
    ForkableKv,
    RuntimeFailed,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.kv_blocks import BlockPool
from adapters.pooled import PooledSlots

_CLOSE_S = 10.0
"""The longest wait for what a shard is at when it is closed. Not tuned."""

_Call = Callable[[], None]


class Stage(PooledSlots):
    """See the module. One thread calls it; `start` hands out futures that any thread may wait for."""

    def __init__(self, shard: CountedShard) -> None:
        super().__init__(BlockPool(shard.block_rules))
        self.shard = shard
        self.layers = shard.layers
        self.spec = shard.spec
        self.capabilities = shard.capabilities
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._broken: AdapterError | None = None
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name=f"stage {shard.layers}", daemon=True
        )
        self._thread.start()

    def start(self, batch: Sequence[Segment], before: Future[ShardResult] | None) -> Future[ShardResult]:
        """Queue a forward. `before`: what the stage in front gives for the same batch, None in the first one; where
        that fails, this fails alike and computes nothing. To be called behind `check`, and with the blocks that it
        takes free."""
        self._pool.reserve(batch)
        done: Future[ShardResult] = Future()

        def run() -> None:
            try:
                hidden = before.result().output if before is not None else None
                self._refuse_broken()
                result = self.shard.forward_layers(batch, hidden)
                # The shard's next forward may overwrite it while this one is still read.
                done.set_result(result if result.stays else replace(result, output=result.output.copy()))
            except AdapterError as error:
                done.set_exception(error)
            except Exception as error:  # a runtime raises what it likes
                done.set_exception(RuntimeFailed(f"{self.layers}: {type(error).__name__}: {error}"))

        self._queue(run)
        return done

    def check(self, batch: Sequence[Segment]) -> None:
        """Refuse what is beyond the capabilities. Raises Unsupported, and DeviceLost where the shard is of no more
        use."""
        self._refuse_broken()
        self._check(batch)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        positions = self._pool.attach(slot, tokens)
        if positions:
            begin = list(tokens[: positions + 1])
            self._tell(lambda: self._attach(slot, begin, positions))
        return positions

    def _attach(self, slot: int, begin: Sequence[int], expected: int) -> None:
        """Let the shard attach as much as its copy did. Raises RuntimeFailed where it remembers less."""
        positions = self.shard.attach(slot, begin)
        if positions != expected:
            raise RuntimeFailed(
                f"{self.layers}: a prefix of {expected} positions was remembered, and {positions} are there"
            )

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        self._pool.share(slot, tokens)
        shared = list(tokens)
        self._tell(lambda: self.shard.share(slot, shared))

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        shard = self.shard
        if not isinstance(shard, ForkableKv):
            raise Unsupported(f"{self.layers}: sequences cannot go on in several ways there")
        self._pool.fork(slot, source, positions, shared)
        self._tell(lambda: shard.fork(slot, source, positions, shared))

    def release(self, slot: int) -> None:
        self._pool.release(slot)
        self._tell(lambda: self.shard.release(slot))

    def discard(self, slot: int) -> None:
        self._pool.discard(slot)
        self._tell(lambda: self.shard.discard(slot))

    def close(self) -> None:
        """End the thread behind what is queued, and close the shard. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._broken = self._broken or DeviceLost(f"{self.layers}: the model was closed")
            self._calls.put(None)
            thread.join(_CLOSE_S)

    def _tell(self, call: _Call) -> None:
        """Queue a call about slots. One that fails leaves the shard behind its copy: it is of no more use."""

        def run() -> None:
            if self._broken is None:
                try:
                    call()
                except Exception as error:  # a runtime raises what it likes
                    failure = error if isinstance(error, DeviceLost) else RuntimeFailed(f"{self.layers}: {error}")
                    self._broken = self._broken or failure

        self._queue(run)

    def _queue(self, call: _Call) -> None:
        self._calls.put(call)

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        self.shard.close()
