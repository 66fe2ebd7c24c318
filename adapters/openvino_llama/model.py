"""A model that two runtimes hold: one reads prompts, the other one decodes.

What a prompt leaves in the KV cache of the first is copied into that of the second; both have it in 16 bits, so that
nothing is rounded. Which rows are whose follows from the request alone (Segment.apart), so that a request's bits do not
depend on how it is batched, moved or resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from adapters.contract import (
    BlockRules,
    CapacityError,
    DeviceLost,
    ForwardResult,
    KvLayout,
    Logits,
    ModelRefused,
    NumericalClass,
    OutOfMemory,
    Segment,
)
from adapters.llama_cpp.model import LlamaModel
from adapters.openvino_rt.model import PagedModel
from adapters.pooled import Bytes

Rows = list[NDArray[np.uint8]]
"""For each cache, keys of all layers and then values: an array of shape (positions, bytes of a position)."""


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """How the elements of a key lie in the two runtimes: `heads` of `head_dim` elements each. `in_pairs`: llama.cpp
    turns neighbours together, where OpenVINO turns those that are half a head apart."""

    heads: int
    head_dim: int
    in_pairs: bool

    def to_pairs(self, keys: Bytes) -> Bytes:
        """Return OpenVINO's keys, shape (positions, bytes), as llama.cpp has them."""
        return self._turn(keys, (2, self.head_dim // 2))

    def to_halves(self, keys: Bytes) -> Bytes:
        """Return llama.cpp's keys, shape (positions, bytes), as OpenVINO has them."""
        return self._turn(keys, (self.head_dim // 2, 2))

    def _turn(self, keys: Bytes, halves: tuple[int, int]) -> Bytes:
        if not self.in_pairs:
            return keys
        elements = np.ascontiguousarray(keys).view(np.uint16).reshape(len(keys), self.heads, *halves)
        turned = np.ascontiguousarray(elements.swapaxes(-1, -2))
        return turned.reshape(len(keys), -1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment of a batch, and where the logits of its wanted rows go."""

    segment: Segment
    rows: Logits


class TwoRuntimesModel:
    """See the module and the contract. Whatever is said of slots is said of the decoder's. The reader holds no more
    than the prompts that are being read, and takes what is before them from the decoder. One thread calls it."""

    def __init__(
        self,
        reader: PagedModel,
        decoder: LlamaModel,
        order: KeyOrder,
        numerical_class: NumericalClass,
        *,
        weights: str,
    ) -> None:
        """Raises ModelRefused where the two have caches that do not go together."""
        ours, its = decoder.capabilities, reader.capabilities
        if reader.row_bytes != decoder.row_bytes or reader.spec.outputs != decoder.spec.outputs:
            raise ModelRefused(
                f"a position of its KV cache has {sum(reader.row_bytes)} bytes in OpenVINO and {sum(decoder.row_bytes)}"
                f" in llama.cpp, or their outputs differ. Choose one of the two alone."
            )
        self._reader, self._decoder, self._order = reader, decoder, order
        self._outputs = list(decoder.spec.output_ids) or slice(None)  # those of the reader's that the decoder has
        self._read_last: dict[int, None] = {}  # the slots that the reader holds, the latest last
        self.spec = decoder.spec
        self.capabilities = replace(
            ours,
            max_batch_rows=min(ours.max_batch_rows, its.max_batch_rows),
            min_rows=max(ours.min_rows, its.min_rows),
            weights=weights,
            numerical_class=numerical_class,
            apart_tokens=decoder.spec.context_length,
            apart_rows=ours.min_rows,
        )

    @property
    def kv_layout(self) -> KvLayout:
        return self._decoder.kv_layout

    @property
    def block_rules(self) -> BlockRules:
        return self._decoder.block_rules

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        decoded = [_as_decoded(segment) for segment in batch]
        self._decoder.check(decoded)
        needed, free = self._decoder.count_needed_blocks(decoded), self.free_blocks()
        if needed > free:
            raise CapacityError(f"{needed} KV blocks are needed and {free} are free")
        counts = [segment.rows[1] - segment.rows[0] for segment in batch]
        begins = [0, *accumulate(counts)]
        logits = np.empty((begins[-1], self.spec.outputs), np.float32)
        parts = [
            _Part(segment, logits[begin:end]) for segment, (begin, end) in zip(batch, pairwise(begins), strict=True)
        ]
        try:
            device_ms = self._read([part for part in parts if not part.segment.apart])
            device_ms += self._decode([part for part in parts if part.segment.apart])
        except DeviceLost as error:
            if not (isinstance(error, OutOfMemory) and error.can_go_on):
                self.close()
            raise
        return ForwardResult(logits, device_ms)

    def _decode(self, parts: Sequence[_Part]) -> float:
        """Run what is behind prompts; returns the milliseconds that it took."""
        if not parts:
            return 0.0
        for part in parts:
            self._let_go(part.segment.slot)
        result = self._decoder.forward([_as_decoded(part.segment) for part in parts])
        _share_out(result.logits, parts)
        return result.device_ms

    def _read(self, parts: Sequence[_Part]) -> float:
        """Read prompts, as many at once as the reader has room for; returns the milliseconds that it took."""
        device_ms = 0.0
        left = list(parts)
        while left:
            together = left[: self._make_room([part.segment for part in left])]
            for part in together:
                self._take_before(part.segment)
            result = self._reader.forward([part.segment for part in together])
            _share_out(result.logits[:, self._outputs], together)
            device_ms += result.device_ms
            for part in together:
                slot = part.segment.slot
                self._decoder.append_rows(slot, part.segment.start, self._copy_rows(part.segment))
                self._read_last.pop(slot, None)
                self._read_last[slot] = None
            del left[: len(together)]
        return device_ms

    def _make_room(self, batch: Sequence[Segment]) -> int:
        """Let go of what nobody reads now, as far as that is needed; returns how many of the first prompts fit."""
        reading = {segment.slot for segment in batch}
        resting = [slot for slot in self._read_last if slot not in reading]
        count = len(batch)
        while count > 1 or resting:
            held = sum(self._count_reader_blocks(segment) for segment in batch[:count])
            if held <= self._reader.free_blocks():
                return count
            if resting:
                self._let_go(resting.pop(0))
            elif count > 1:
                self._let_go(batch[count - 1].slot)
                count -= 1
        return count

    def _count_reader_blocks(self, segment: Segment) -> int:
        """Return how many free blocks the reader takes for a prompt's next tokens, and for what is before them where it
        does not hold that."""
        held = self._reader.count_cached_positions(segment.slot)
        if held >= segment.start:
            return self._reader.count_needed_blocks([segment])
        end = segment.start + max(len(segment.tokens), self._reader.capabilities.min_rows)
        return -(-end // self._reader.capabilities.block_tokens)

    def _take_before(self, segment: Segment) -> None:
        """Let the reader hold what is before a prompt's next tokens."""
        if self._reader.count_cached_positions(segment.slot) >= segment.start:
            return
        self._let_go(segment.slot)
        rows = self._decoder.read_rows(segment.slot, segment.start)
        keys = len(rows) // 2
        self._reader.import_rows(segment.slot, [*map(self._order.to_halves, rows[:keys]), *rows[keys:]])

    def _copy_rows(self, segment: Segment) -> Rows:
        rows = self._reader.export_rows(segment.slot, segment.start, segment.start + len(segment.tokens))
        keys = len(rows) // 2
        return [*map(self._order.to_pairs, rows[:keys]), *rows[keys:]]

    def _let_go(self, slot: int) -> None:
        self._read_last.pop(slot, None)
        self._reader.release(slot)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        return self._decoder.attach(slot, tokens)

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        self._decoder.share(slot, tokens)

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        self._decoder.fork(slot, source, positions, shared)

    def release(self, slot: int) -> None:
        self._let_go(slot)
        self._decoder.release(slot)

    def discard(self, slot: int) -> None:
        self._read_last.pop(slot, None)
        self._reader.discard(slot)
        self._decoder.discard(slot)

    def count_cached_positions(self, slot: int) -> int:
        return self._decoder.count_cached_positions(slot)

    def free_blocks(self) -> int:
        return self._decoder.free_blocks()

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        return self._decoder.count_needed_blocks([_as_decoded(segment) for segment in batch])

    def count_touched_blocks(self) -> int:
        """See adapters.loaded_model.CountsTouchedBlocks: the share of both caches, whose blocks have one size."""
        both = (self._reader, self._decoder)
        touched = sum(model.count_touched_blocks() for model in both)
        return touched * self.capabilities.total_blocks // sum(model.block_rules.blocks for model in both)

    def export_kv(self, slot: int, positions: int, start_page: int = 0) -> Iterator[Bytes]:
        return self._decoder.export_kv(slot, positions, start_page)

    def import_kv(self, slot: int, positions: int, pages: Bytes, start_pages: Sequence[int] = (0,)) -> None:
        self._decoder.import_kv(slot, positions, pages, start_pages)

    def close(self) -> None:
        self._reader.close()
        self._decoder.close()


def _share_out(logits: Logits, parts: Sequence[_Part]) -> None:
    begin = 0
    for part in parts:
        part.rows[...] = logits[begin : begin + len(part.rows)]
        begin += len(part.rows)


def _as_decoded(segment: Segment) -> Segment:
    """Return a segment as the decoder counts its rows: all of them are of one class there."""
    return replace(segment, apart=False) if segment.apart else segment
