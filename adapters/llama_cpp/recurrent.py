"""A GGUF file on llama.cpp whose memory is, or has beside a KV cache, a recurrent state: one of all tokens so far.

Nothing of a state can be cut off, and padding would be written into it. So a sequence goes on where it ends, or begins
anew, and a forward has the rows that are asked for and no others. States are bytes of the library's own, of a whole
sequence. They are taken into a larger context, and set aside where a process has no more contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from adapters.contract import BlockRules, LoadOptions, NumericalClass, OutOfMemory, Segment, Unsupported
from adapters.kv_blocks import BlockPool
from adapters.llama_cpp.contexts import BLOCK_TOKENS, STEP_CELLS, ContextModel, HeldSequence, OpenModel
from adapters.pooled import describe_capabilities
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec

State = tuple[int, NDArray[np.uint8]]
"""How many positions a sequence holds, and its whole state as the library writes it."""


class RecurrentModel(ContextModel[State]):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self, model: OpenModel, spec: ModelSpec, options: LoadOptions, numerical_class: NumericalClass, weights: str
    ) -> None:
        """`spec.bytes_per_token` is not looked at: the library says what it is. Raises OutOfMemory, also where the KV
        cache has no room for a state; RuntimeFailed; and Unsupported for a class that pads."""
        if numerical_class.segment_rows > 1 or numerical_class.fixed_width > 1:
            raise Unsupported(f"{numerical_class}: padding would be written into a recurrent state")
        state_bytes, position_bytes = _measure_state(model)
        rules = _divide_memory(options, spec.context_length, state_bytes, position_bytes)
        super().__init__(model, UncutBlocks(rules), numerical_class, spec.outputs)
        self.spec = replace(spec, bytes_per_token=position_bytes)
        capabilities = describe_capabilities(
            rules, self.spec, options, numerical_class, weights=weights, device=model.device
        )
        self.capabilities = replace(capabilities, slots=rules.slots, rewinds=False)

    def _read(self, sequence: HeldSequence[State]) -> State:
        if sequence.kept is not None:
            return sequence.kept
        return sequence.held, self._library.read_sequence(sequence.context)

    def _take_first(self, kept: State, positions: int) -> State:
        if kept[0] != positions:  # the pool lets nobody ask for that
            raise Unsupported(f"a recurrent state of {kept[0]} tokens cannot be cut to {positions}")
        return kept

    def _write(self, context: int, kept: State) -> int:
        self._library.write_state(context, kept[1])
        return kept[0]

    def release(self, slot: int) -> None:
        self._drop(slot)

    def discard(self, slot: int) -> None:
        """Nobody shares it, and its context is closed."""
        self._drop(slot)


class UncutBlocks(BlockPool):
    """Blocks of sequences that go on where they end, or begin anew. Nothing is shared."""

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """See the contract: what a slot holds is good for all of its tokens only."""
        self._count_shared(slot, tokens)

    def _check_segment(self, segment: Segment, max_context: int) -> None:
        super()._check_segment(segment, max_context)
        held = self.count_cached_positions(segment.slot)
        if segment.start not in (0, held):
            raise Unsupported(
                f"slot {segment.slot}: it holds the state of {held} tokens, which cannot be cut to {segment.start}"
            )


def _divide_memory(options: LoadOptions, context: int, state_bytes: int, position_bytes: int) -> BlockRules:
    """Return the blocks and slots of a memory. At most half of it is for states, and no more blocks are counted than
    all slots can have. Raises OutOfMemory where it holds no state."""
    room = options.kv_cache_bytes // 2 // state_bytes
    if not room:
        raise OutOfMemory(
            f"a sequence has a state of {state_bytes} bytes, and the KV cache of {options.kv_cache_bytes} bytes is to "
            "hold twice as much: set limits.kv_cache higher"
        )
    slots = min(options.slots, room)
    left = options.kv_cache_bytes - slots * state_bytes
    blocks = min(left // (BLOCK_TOKENS * position_bytes), slots * ceil_div(context, BLOCK_TOKENS))
    return BlockRules(max(1, blocks), BLOCK_TOKENS, slots)


def _measure_state(model: OpenModel) -> tuple[int, int]:
    """Return the bytes of a sequence's state, and those that a position adds to it, at least 1: of two short ones."""
    library, batch, step = model.library, model.new_batch(2), 2
    context = model.open_context(STEP_CELLS)
    try:
        sizes = []
        for start in (0, step):
            model.decode(context, batch, [0] * step, start, range(0))
            sizes.append(len(library.read_sequence(context)))
    finally:
        model.free_batch(batch)
        library.close_context(context)
    each = max(0, sizes[1] - sizes[0]) // step
    return max(1, sizes[0] - step * each), max(1, each)
