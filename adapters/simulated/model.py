"""A deterministic toy language model over bytes, with real KV bookkeeping.

Each position's logits depend on *every* token before it through a hash, kept per position in the blocks of a KV cache.
A wrong rollback, a mixed-up slot or block, or a stale position changes the output. Most of the weight comes from the
last two tokens, so that its text repeats itself and drafts can be right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adapters.contract import (
    BlockRules,
    Capabilities,
    DeviceLost,
    Hidden,
    KvLayout,
    LayerRange,
    LoadOptions,
    NumericalClass,
    OutOfMemory,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.kv_blocks import BlockPool
from adapters.pooled import Bytes, PooledModel
from adapters.simulated.script import Script
from adapters.tokenizer import byte_texts
from device_profiles.profile import Precision
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec, vocabulary_fingerprint

# Bytes and 16 control tokens. Tests and golden replays rest on all of these.
VOCABULARY = 272
CONTEXT_TOKENS = 4096  # as above
BLOCK_TOKENS = 16  # as above
APART_TOKENS = 32  # as above: rows behind longer prompts are of the other class
BYTES_PER_TOKEN = 1024  # as above
_MASK = (1 << 64) - 1
_LETTERS = frozenset(b"etaoin shrdlu,.\n")
_CONTEXTS = 97  # rows of the table that logits come from. As above.
# An odd number without pattern, for drafts that agree by chance. As above.
_DRAW = 0xD6E8FEB86659FD93


def _tables() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(20260101)
    context = rng.normal(0.0, 2.0, (_CONTEXTS, VOCABULARY)).astype(np.float32)
    context[:, [b for b in range(VOCABULARY) if b not in _LETTERS]] -= 6.0
    context[:, 258:] = -30.0  # unused ids
    context[:, 257] = -30.0  # the start token is never output
    history = rng.normal(0.0, 0.15, (64, VOCABULARY)).astype(np.float32)
    return context, history


_CLASS = NumericalClass(Precision.FP32, Precision.FP32, apart=True)


class ToyModel(PooledModel):
    """See the module. One thread calls it."""

    def __init__(
        self,
        script: Script,
        options: LoadOptions,
        numerical_class: NumericalClass = _CLASS,
        layers: LayerRange | None = None,
    ) -> None:
        self.layers = layers or LayerRange(0, script.layers)
        self._reads_tokens, self._gives_logits = not self.layers.first, self.layers.end == script.layers
        share = (self.layers.end - self.layers.first) / script.layers
        held = int(BYTES_PER_TOKEN * share)
        blocks = max(1, int(options.kv_cache_bytes / (BLOCK_TOKENS * BYTES_PER_TOKEN * share)))
        self._script, self._width = script.keep(self.layers).on(options.device), numerical_class.fixed_width
        super().__init__(BlockPool(BlockRules(blocks, BLOCK_TOKENS, options.slots)))
        self._context, self._history = _tables()
        # What a KV cache holds, by block: each position's token, and the hash of everything up to it.
        self._cache = np.zeros((blocks, BLOCK_TOKENS, 2), np.uint64)
        self.kv_layout = KvLayout("simulated", BLOCK_TOKENS, (self._cache[0].nbytes,))
        self._forwards = 0
        self._dead = False
        self.spec = ModelSpec(
            layers=script.layers,
            vocabulary_size=VOCABULARY,
            context_length=CONTEXT_TOKENS,
            bytes_per_token=held,
            vocabulary_fingerprint=vocabulary_fingerprint(byte_texts()),
        )
        self.capabilities = Capabilities(
            slots=options.slots,
            max_context_tokens=CONTEXT_TOKENS,
            max_batch_rows=options.max_batch_rows,
            block_tokens=BLOCK_TOKENS,
            total_blocks=blocks,
            row_invariant=True,
            min_rows=1,
            weights="fp32",
            numerical_class=numerical_class,
            exactness=options.exactness,
            device=options.device,
            apart_tokens=APART_TOKENS if numerical_class.apart else 0,
        )

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        """A hidden state is the hash of everything up to its token, in four numbers."""
        if self._dead:
            raise DeviceLost("simulated: the model was closed or its device was lost")
        self._check(batch)
        for segment in batch:
            if not all(0 <= token < VOCABULARY for token in segment.tokens):
                raise Unsupported(f"slot {segment.slot}: a token is outside the vocabulary of {VOCABULARY}")
        armed = self._forwards > 0 or self._script.arm < 0
        if armed or any(self._script.arm in segment.tokens for segment in batch):
            self._forwards += 1
        try:
            garbage = self._script.strike(self._forwards)
        except DeviceLost:
            self._dead = True
            raise
        rows = sum(len(segment.tokens) for segment in batch)
        if 0 < self._script.memory_rows < rows:
            raise OutOfMemory(f"simulated: the device has no memory for {rows} rows", can_go_on=True)
        self._pool.reserve(batch)
        width = self._width or rows
        padded = ceil_div(rows, width) * width
        self._script.wait(padded, self._forwards)
        first, hashes = 0, _join_hashes(hidden) if hidden is not None else []
        runs = []
        for segment in batch:
            runs.append(self._run(segment, hashes[first : first + len(segment.tokens)]))
            first += len(segment.tokens)
        device_ms = self._script.base_ms + self._script.row_ms * padded
        if not self._gives_logits:
            return ShardResult(_split_hashes([state for _, mine in runs for state in mine]), device_ms)
        logits = np.concatenate([part for part, _ in runs]) if runs else np.empty((0, VOCABULARY), np.float32)
        if bits := self._script.last_bits(width, self._forwards):
            logits += np.float32(bits)
        if garbage:
            logits[:] = np.nan
        return ShardResult(logits, device_ms)

    def _run(self, segment: Segment, given: Sequence[int]) -> tuple[NDArray[np.float32], list[int]]:
        """Return the logits of the wanted rows, and the hash behind each token: `given`, where layers come before."""
        hashes = []
        table = self._pool.table(segment.slot, segment.start + len(segment.tokens))
        before, last = self._at(table, segment.start - 1)
        garbage = self._script.garbage >= 0 and self._script.garbage in self._list_held_tokens(table, segment.start)
        first, end = segment.rows
        out = np.empty((end - first, VOCABULARY), np.float32)
        for index, token in enumerate(segment.tokens):
            position = segment.start + index
            # Rows of the single-row kernel are a numerical class of their own, as on real runtimes: mixing shows.
            before = ((before ^ (token + 1 + VOCABULARY * segment.apart)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
            if not self._reads_tokens:
                before = given[index]
            hashes.append(before)
            garbage = garbage or token == self._script.garbage
            self._cache[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = before, token
            if first <= index < end:
                out[index - first] = self._context[(token * 31 + last) % _CONTEXTS] + self._history[before >> 58]
                if self._script.agree < 1.0:
                    _demote_choice(out[index - first], self._script.rank_choice(before * _DRAW & _MASK))
                if garbage:
                    out[index - first] = np.nan
            last = token
        shift = self._script.shift_now()
        return np.roll(out, shift, axis=1) if shift else out, hashes

    def _read_pages(self, cache: int, slot: int, table: Sequence[int], start: int) -> Bytes:
        return self._cache[list(table[start:])].reshape(-1).view(np.uint8)

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        begin, first = span
        own = pages.view(np.uint64).reshape(len(table) - begin, BLOCK_TOKENS, 2)
        self._cache[list(table[first:])] = own[first - begin :]

    def _copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._cache[list(targets)] = self._cache[list(sources)]

    def _erase(self, blocks: Sequence[int]) -> None:
        self._cache[list(blocks)] = 0

    def _list_held_tokens(self, table: Sequence[int], count: int) -> NDArray[np.uint64]:
        return self._cache[list(table), :, 1].reshape(-1)[:count]

    def _at(self, table: Sequence[int], position: int) -> tuple[int, int]:
        """Return (hash, token) of a cached position; the beginning has its own."""
        if position < 0:
            return 0, 7
        before, token = self._cache[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS]
        return int(before), int(token)

    def close(self) -> None:
        self._dead = True


def _split_hashes(hashes: Sequence[int]) -> Hidden:
    """Return each hash of 64 bits as four numbers of 16, which float32 holds exactly."""
    return np.array([[number >> shift & 0xFFFF for shift in (0, 16, 32, 48)] for number in hashes], np.float32).reshape(
        -1, 4
    )


def _join_hashes(hidden: Hidden) -> list[int]:
    return [sum(int(part) << shift for part, shift in zip(row, (0, 16, 32, 48), strict=True)) for row in hidden]


def _demote_choice(row: NDArray[np.float32], place: int) -> None:
    """Let what comes first in a row of logits come at that place, and what is before it there one place up."""
    if place:
        best = np.argsort(-row, kind="stable")[: place + 1]
        row[np.roll(best, -1)] = row[best]
