"""A GGUF file on llama.cpp whose memory is a KV cache.

Exactness (measured, docs/adr/0109-llama-cpp-behind-the-contract.md): with repacked matrices a row's logits are the same
to the bit in every forward of two rows or more whose logits are wanted of two rows or more; a single row takes other
kernels. So `bit` pads to two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from adapters.contract import BlockRules, KvLayout, LoadOptions, NumericalClass, Segment
from adapters.kv_blocks import BlockPool
from adapters.llama_cpp.contexts import BLOCK_TOKENS, STEP_CELLS, ContextModel, HeldSequence, OpenModel
from adapters.llama_cpp.state import CacheFormat, Rows
from adapters.pooled import Bytes, PooledModel, describe_capabilities
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec


class CopiedBlocks(BlockPool):
    """Of sequences that lie apart: what a slot begins with is a copy of its own, and counts as one. `attach`
    and `fork` give a slot blocks of its own, or such as nobody has. Which blocks they are to be copies of stands in
    `sources` until the next call.

    Copies of what may be garbage may be garbage: whatever comes of one computed block, or is said to equal it, has its
    line. `forget` is called with each block that is to hold something else from now on.
    """

    def __init__(self, rules: BlockRules, forget: Callable[[int], None]) -> None:
        super().__init__(rules)
        self._forget = forget
        self.sources: list[int] = []
        self._numbers = count(1)
        self._lines = [0] * rules.blocks
        self._bad_lines: set[int] = set()

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """Where there is no room for all that is remembered, it is less."""
        if not super().attach(slot, tokens):
            return 0
        table = self._tables[slot]
        own: list[int] = []
        for block in table:
            if self._users[block] == 1:  # nobody else has it: it is the slot's from now on
                own.append(block)
            elif self.free:
                own.append(self._take_block())
                self._lines[own[-1]] = self._lines[block]
                self._drop(block)
            else:
                break
        for block in table[len(own) :]:
            self._drop(block)
        self.sources = table[: len(own)]
        if not own:
            self._tables[slot] = []
            self._drop_all(slot)
            return 0
        self._tables[slot] = own
        self._held[slot] = self._fixed[slot] = len(own) * self.block_tokens
        return self._held[slot]

    def fork(self, slot: int, source: int, positions: int, shared: int) -> list[tuple[int, int]]:
        """All blocks of the source are to be copied."""
        fixed = self._fixed.get(source, 0)
        pairs = super().fork(slot, source, positions, 0)
        self._fixed[source] = max(fixed, shared // self.block_tokens * self.block_tokens)
        self.sources = [block for block, _ in pairs]
        for block, own in pairs:
            self._lines[own] = self._lines[block]
        self._fixed[slot] = shared // self.block_tokens * self.block_tokens
        return pairs

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """Of several slots with the same positions the first one's are remembered."""
        whole = self._count_shared(slot, tokens)
        table = self._tables.get(slot, [])
        good = next((at for at in range(whole) if self._lines[table[at]] in self._bad_lines), whole)
        if good:
            known_blocks = self._prefixes.add(table[:good], tokens, self.find_root(slot))
            for own, known in zip(table, known_blocks, strict=False):
                self._lines[own] = self._lines[known]
            self._fixed[slot] = max(self._fixed.get(slot, 0), good * self.block_tokens)

    def release(self, slot: int) -> list[int]:
        """Free a slot's blocks. Nothing is left behind that would have to be overwritten."""
        self._drop_all(slot)
        return []

    def discard(self, slot: int) -> list[int]:
        self._bad_lines.update(self._lines[block] for block in self._tables.get(slot, ()))
        self._drop_all(slot)
        for block, line in enumerate(self._lines):
            if line in self._bad_lines and block in self._prefixes:
                self._prefixes.forget(block)
                if self._users[block] == 0:
                    self._prefixes.wake(block)
                    self._free.append(block)
        self._bad_lines &= {self._lines[block] for table in self._tables.values() for block in table}
        return []

    def list_remembered(self, slot: int) -> list[tuple[int, int]]:
        """Return which of a slot's blocks are remembered: the place in its table, and the block."""
        return [(at, block) for at, block in enumerate(self._tables.get(slot, ())) if block in self._prefixes]

    def find_holder(self, block: int) -> tuple[int, int]:
        """Return which slot has a block that is in use, and at which place of its table."""
        return next((slot, table.index(block)) for slot, table in self._tables.items() if block in table)

    def _take_block(self) -> int:
        block = super()._take_block()
        self._lines[block] = next(self._numbers)
        self._forget(block)
        return block


class LlamaModel(ContextModel[Rows], PooledModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self, model: OpenModel, spec: ModelSpec, options: LoadOptions, numerical_class: NumericalClass, weights: str
    ) -> None:
        """`spec.bytes_per_token` is not looked at: the library says what it is. Raises OutOfMemory, and RuntimeFailed
        where the model's state is more than a KV cache."""
        self._kept: dict[int, Rows] = {}  # what remembered blocks hold that no slot has any more
        self._coming: Rows = []
        self._format = _find_format(model)
        position_bytes = self._format.position_bytes
        blocks = max(1, options.kv_cache_bytes // (BLOCK_TOKENS * position_bytes))
        if model.library.most_contexts:  # sequences are computed one after another: more would wait for contexts, too
            options = replace(options, slots=min(options.slots, model.library.most_contexts))
        pad_to, multiple = max(numerical_class.segment_rows, 1), numerical_class.fixed_width or 1
        rules = BlockRules(blocks, BLOCK_TOKENS, options.slots, pad_to=pad_to, multiple=multiple, copies=True)
        self._copied = CopiedBlocks(rules, self._forget)
        super().__init__(model, self._copied, numerical_class, spec.outputs)
        self.kv_layout = KvLayout(
            f"{model.library.version} {self._format.name}",
            BLOCK_TOKENS,
            tuple(BLOCK_TOKENS * size for size in self._format.row_bytes),
        )
        self.spec = replace(spec, bytes_per_token=position_bytes)
        self.capabilities = describe_capabilities(
            rules, self.spec, options, numerical_class, weights=weights, device=model.device
        )

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """The bytes of a position in each cache, keys of all layers and then values."""
        return self._format.row_bytes

    def check(self, batch: Sequence[Segment]) -> None:
        """Refuse what is beyond the capabilities. Raises Unsupported."""
        self._check(batch)

    def read_rows(self, slot: int, positions: int) -> Rows:
        """Return what the first positions of a slot have in each cache; valid until the next call."""
        return self._take_first(self._read(self._sequences[slot]), positions)

    def append_rows(self, slot: int, start: int, rows: Rows) -> None:
        """Let a slot hold rows that were computed elsewhere, behind its first `start` positions. Raises CapacityError;
        then nothing has changed."""
        self._pool.reserve([Segment(slot, start, range(len(rows[0])), (0, 0))])
        sequence = self._sequences.setdefault(slot, HeldSequence())
        if start:
            rows = [np.concatenate(parts) for parts in zip(self.read_rows(slot, start), rows, strict=True)]
        self._close(sequence)
        sequence.kept = rows

    def _read(self, sequence: HeldSequence[Rows]) -> Rows:
        """Return what a sequence holds: views of what the library wrote, or what it begins with."""
        if sequence.kept is not None:
            return sequence.kept
        return self._format.split(self._library.read_state(sequence.context))

    def _take_first(self, kept: Rows, positions: int) -> Rows:
        return [rows[:positions] for rows in kept]

    def _write(self, context: int, kept: Rows) -> int:
        self._library.write_state(context, self._format.join(kept))
        return len(kept[0])

    def _forget(self, block: int) -> None:
        self._kept.pop(block, None)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        positions = self._pool.attach(slot, tokens)
        if positions:
            self._begin(slot, positions)
        return positions

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        self._pool.fork(slot, source, positions, shared)
        self._begin(slot, positions)

    def _begin(self, slot: int, positions: int) -> None:
        """Let a slot begin with copies of the blocks that the pool named."""
        read: dict[int, Rows] = {}
        parts = []
        for block in self._copied.sources:
            if block in self._kept:  # nobody had it
                parts.append(self._kept.pop(block))
                continue
            owner, place = self._copied.find_holder(block)
            if owner not in read:
                read[owner] = self._read(self._sequences[owner])
            at = place * BLOCK_TOKENS
            parts.append([rows[at : at + BLOCK_TOKENS] for rows in read[owner]])
        rows = [np.concatenate(pieces)[:positions] for pieces in zip(*parts, strict=True)]
        self._sequences[slot] = HeldSequence(kept=rows)

    def release(self, slot: int) -> None:
        remembered = self._copied.list_remembered(slot)
        if remembered and self._model:
            rows = self._read(self._sequences[slot])
            for place, block in remembered:
                at = place * BLOCK_TOKENS
                self._kept[block] = [row[at : at + BLOCK_TOKENS].copy() for row in rows]
        self._drop(slot)

    def discard(self, slot: int) -> None:
        self._copied.discard(slot)
        self._drop(slot)

    def export_kv(self, slot: int, positions: int, start_page: int = 0) -> Iterator[Bytes]:
        """The library writes all caches at once."""
        table = self._check_export(slot, positions, start_page)
        first = start_page * BLOCK_TOKENS
        for rows in self._read(self._sequences[slot]):
            pages = np.zeros((len(table) * BLOCK_TOKENS - first, rows.shape[1]), np.uint8)
            pages[: positions - first] = rows[first:positions]
            yield pages.reshape(-1)

    def import_kv(self, slot: int, positions: int, pages: Bytes, start_pages: Sequence[int] = (0,)) -> None:
        own = self._sequences.get(slot)
        before = self._read(own) if own is not None else None
        held = self.count_cached_positions(slot)
        most = min(max(positions, 0), self.capabilities.max_context_tokens)
        whole = ceil_div(most, BLOCK_TOKENS) * BLOCK_TOKENS
        self._coming = [np.zeros((whole, size), np.uint8) for size in self._format.row_bytes]
        super().import_kv(slot, positions, pages, start_pages)
        for coming, rows in zip(self._coming, before or self._coming, strict=True):
            coming[:held] = rows[:held]
        if own is not None:
            self._close(own)
        self._sequences[slot] = HeldSequence(kept=[coming[:positions] for coming in self._coming])
        self._coming = []

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        begin, first = span
        rows = pages.reshape(-1, self._format.row_bytes[cache])
        self._coming[cache][first * BLOCK_TOKENS : begin * BLOCK_TOKENS + len(rows)] = rows[
            (first - begin) * BLOCK_TOKENS :
        ]

    def close(self) -> None:
        super().close()
        self._kept.clear()


def _find_format(model: OpenModel) -> CacheFormat:
    library, batch = model.library, model.new_batch(2)
    first = model.open_context(STEP_CELLS)
    try:
        model.decode(first, batch, [0, 0], 0, range(0))
        return library.read_format(first)
    finally:
        model.free_batch(batch)
        library.close_context(first)
