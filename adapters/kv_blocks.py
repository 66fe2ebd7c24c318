"""Block tables of a paged KV pool: which blocks a slot holds, and how many positions are written in them.

Which full KV blocks hold which tokens, so that a shared prompt prefix is computed once.

A block is found by the tokens it holds and the block before it. Keys are compared whole, never by a digest alone:
two prompts cannot be taken for one another. Blocks that nobody uses stay until their room is needed; the one used
least recently goes first, and a block always goes before the one it continues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from adapters.contract import BlockRules, CapacityError, Segment, Unsupported
from device_profiles.units import ceil_div

_Key = tuple[int, tuple[int, ...]]
_ROOT = 0


class PrefixIndex:
    """Full blocks by what they hold. `block_tokens` is the positions of one block."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._blocks: dict[_Key, tuple[int, int]] = {}  # -> (the block's number, its unique id)
        self._keys: dict[int, _Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last_id = _ROOT

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def idle(self) -> int:
        """How many known blocks nobody uses."""
        return len(self._idle)

    def find(self, tokens: Sequence[int], most: int, root: int = _ROOT) -> list[int]:
        """Return the known blocks that hold the beginning of `tokens`, in order, at most `most`. `root`: as `add` was
        given it."""
        blocks: list[int] = []
        parent = root
        for part in self._parts(tokens, most):
            entry = self._blocks.get((parent, part))
            if entry is None:
                break
            blocks.append(entry[0])
            parent = entry[1]
        return blocks

    def add(self, blocks: Sequence[int], tokens: Sequence[int], root: int = _ROOT) -> list[int]:
        """Note what full blocks hold; returns the blocks to use, known ones in the place of equal new ones. `root`:
        zero or less; what begins with another one is never equal."""
        kept: list[int] = []
        parent = root
        for block, part in zip(blocks, self._parts(tokens, len(blocks)), strict=False):
            key = (parent, part)
            entry = self._blocks.get(key)
            if entry is None:
                self._last_id += 1
                entry = self._blocks[key] = (block, self._last_id)
                self._keys[block] = key
            kept.append(entry[0])
            parent = entry[1]
        return kept

    def rest(self, block: int) -> None:
        """Nobody uses the block any more; it is the youngest of the idle ones."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """The block is used again."""
        self._idle.pop(block, None)

    def forget(self, block: int) -> None:
        """Forget what a block that is used holds, if it is known. Nobody finds what continues it either; that goes when
        its room is needed."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def evict(self) -> int:
        """Forget the idle block used least recently and return it. Raises KeyError when there is none."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block

    def _parts(self, tokens: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        for index in range(min(len(tokens) // self._size, most)):
            yield tuple(tokens[index * self._size : (index + 1) * self._size])


class BlockPool:
    """Blocks by `rules`. No I/O, no tensors.

    The padding of a segment is written behind it and is not counted as held, so the next segment overwrites it. Several
    slots may hold one block of a common prefix: nobody writes to it then.
    """

    def __init__(self, rules: BlockRules) -> None:
        self.rules = rules
        self.block_tokens = rules.block_tokens
        self.total = blocks = rules.blocks
        self.touched = 0
        """How many blocks ever held something: of a pool that the system fills as it is written, those in memory."""
        self._free = list(range(blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._held: dict[int, int] = {}
        self._fixed: dict[int, int] = {}  # leading positions of a slot that others may hold too
        self._remembered: dict[int, int] = {}  # those of them that are in the prefix index
        self._users = [0] * blocks
        self._suspects: set[int] = set()  # blocks that may hold garbage, until nobody uses them
        self._roots: dict[int, int] = {}  # whose prefixes a slot shares; _ROOT where it is not here
        self._prefixes = PrefixIndex(rules.block_tokens)

    @property
    def free(self) -> int:
        """How many blocks are free, those with a remembered prefix among them."""
        return len(self._free) + self._prefixes.idle

    def count_cached_positions(self, slot: int) -> int:
        return self._held.get(slot, 0)

    def table(self, slot: int, tokens: int) -> list[int]:
        """Return the blocks that hold the slot's first `tokens` positions."""
        return self._tables[slot][: ceil_div(tokens, self.block_tokens)]

    def count_padded_rows(self, segment: Segment) -> int:
        rules = self.rules
        rows = ceil_div(max(len(segment.tokens), rules.pad_to), rules.multiple) * rules.multiple
        return rows + rows % 2 if 0 < rules.even_behind < rows else rows

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        """Return how many free blocks the batch takes."""
        return sum(max(0, self._blocks_for(segment) - len(self._tables.get(segment.slot, ()))) for segment in batch)

    def reserve(self, batch: Sequence[Segment]) -> None:
        """Give every segment its blocks and note what is held. Raises CapacityError; then nothing changed."""
        needed = self.count_needed_blocks(batch)
        if needed > self.free:
            raise CapacityError(f"{needed} KV blocks are needed and {self.free} of {self.total} are free")
        for segment in batch:
            table = self._tables.setdefault(segment.slot, [])
            while len(table) < self._blocks_for(segment):
                table.append(self._take_block())
            self._held[segment.slot] = segment.start + len(segment.tokens)

    def extend(self, slot: int, positions: int) -> int:
        """Give a slot blocks for its first `positions`, which are written from outside. Returns how many blocks it had.

        Raises CapacityError, and Unsupported where it holds as many, or positions that it does not share.
        """
        self._check_slot(slot)
        cached = self.count_cached_positions(slot)
        if cached != self._fixed.get(slot, 0) or cached >= positions:
            raise Unsupported(f"slot {slot} holds {cached} positions; others cannot be written behind them")
        had = len(self._tables.get(slot, ()))
        self.reserve([Segment(slot, cached, range(positions - cached), (0, 0))])
        return had

    def choose_root(self, slot: int, root: int) -> None:
        """Let a free slot share prefixes from now on with slots of this `root` (zero or less) alone. Raises
        Unsupported."""
        self._check_slot(slot)
        if held := self.count_cached_positions(slot):
            raise Unsupported(f"slot {slot} holds {held} positions; an adapter is chosen for a free one")
        self._roots[slot] = root

    def find_root(self, slot: int) -> int:
        return self._roots.get(slot, _ROOT)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        self._check_slot(slot)
        if self.count_cached_positions(slot):
            raise Unsupported(
                f"slot {slot} holds {self.count_cached_positions(slot)} positions; a prefix is attached to a free one"
            )
        blocks = self._prefixes.find(tokens, (len(tokens) - 1) // self.block_tokens, self.find_root(slot))
        if not blocks:
            return 0
        for block in blocks:
            self._use(block)
        self._tables[slot] = blocks
        self._held[slot] = self._fixed[slot] = self._remembered[slot] = len(blocks) * self.block_tokens
        return self._held[slot]

    def fork(self, slot: int, source: int, positions: int, shared: int) -> list[tuple[int, int]]:
        """See adapters.contract.ForkableKv. Returns which blocks of the source are to be copied to which of the
        slot."""
        self._check_slot(slot)
        if self.count_cached_positions(slot):
            raise Unsupported(f"slot {slot} holds {self.count_cached_positions(slot)} positions; a fork is a free one")
        if not 0 <= shared <= positions <= self.count_cached_positions(source) or positions == 0:
            held = self.count_cached_positions(source)
            raise Unsupported(f"slot {source} holds {held} positions; {positions} of them were to be forked")
        table = self.table(source, positions)
        count = shared // self.block_tokens
        if len(table) - count > self.free:
            raise CapacityError(f"{len(table) - count} KV blocks are needed and {self.free} of {self.total} are free")
        for block in table[:count]:
            self._use(block)
        own = [self._take_block() for _ in table[count:]]
        self._roots[slot] = self.find_root(source)
        self._tables[slot] = [*table[:count], *own]
        self._held[slot] = positions
        self._fixed[slot] = count * self.block_tokens
        self._fixed[source] = max(self._fixed.get(source, 0), count * self.block_tokens)
        self._remembered[slot] = min(self._remembered.get(source, 0), count * self.block_tokens)
        return list(zip(table[count:], own, strict=True))

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        count = self._count_shared(slot, tokens)
        if count * self.block_tokens <= self._remembered.get(slot, 0):
            return
        table = self._tables[slot]
        count = next((index for index in range(count) if table[index] in self._suspects), count)
        if count * self.block_tokens <= self._remembered.get(slot, 0):
            return
        for index, block in enumerate(self._prefixes.add(table[:count], tokens, self.find_root(slot))):
            own = table[index]
            if block != own:  # the same content is there already: one copy is enough
                self._use(block)
                self._drop(own)
                table[index] = block
        self._remembered[slot] = count * self.block_tokens
        self._fixed[slot] = max(self._fixed.get(slot, 0), self._remembered[slot])

    def _count_shared(self, slot: int, tokens: Sequence[int]) -> int:
        """Return how many whole blocks of a slot are to be shared. Raises Unsupported where it holds fewer."""
        count, cached = len(tokens) // self.block_tokens, self.count_cached_positions(slot)
        if count * self.block_tokens > cached:
            raise Unsupported(f"slot {slot} holds {cached} positions, fewer than the {len(tokens)} to share")
        return count

    def release(self, slot: int) -> list[int]:
        """Free a slot's blocks; what others may ask for again is remembered until the room is needed.

        Returns what `discard` does, and is that for a slot that shares garbage: what it computed follows from it.
        """
        if self._suspects and not self._suspects.isdisjoint(self._tables.get(slot, ())):
            return self.discard(slot)
        self._drop_all(slot)
        return []

    def _drop_all(self, slot: int) -> list[int]:
        blocks = self._tables.pop(slot, [])
        for block in reversed(blocks):
            self._drop(block)
        self._held.pop(slot, None)
        self._fixed.pop(slot, None)
        self._remembered.pop(slot, None)
        return blocks

    def discard(self, slot: int) -> list[int]:
        """See adapters.contract.LoadedModel.discard. Returns the blocks that nobody uses any more: they are to be
        overwritten before the next forward."""
        for block in self._tables.get(slot, ()):
            self._prefixes.forget(block)
            self._suspects.add(block)
        blocks = self._drop_all(slot)
        unused = [block for block in blocks if self._users[block] == 0]
        self._suspects.difference_update(unused)
        return unused

    def _take_block(self) -> int:
        block = self._free.pop() if self._free else self._prefixes.evict()
        self._users[block] = 1
        self.touched = max(self.touched, self.total - len(self._free))
        return block

    def _use(self, block: int) -> None:
        self._prefixes.wake(block)
        self._users[block] += 1

    def _drop(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._prefixes:
                self._prefixes.rest(block)
            else:
                self._free.append(block)

    def check(self, batch: Sequence[Segment], *, max_rows: int, max_context: int) -> None:
        """Raise Unsupported when the batch breaks the contract."""
        seen: set[int] = set()
        rows = 0
        for segment in batch:
            self._check_segment(segment, max_context)
            if segment.slot in seen:
                raise Unsupported(f"slot {segment.slot} stands twice in one batch")
            seen.add(segment.slot)
            rows += len(segment.tokens) if segment.apart else max(len(segment.tokens), self.rules.pad_to)
        if not batch:
            raise Unsupported("the batch is empty")
        if rows > max_rows:
            raise Unsupported(f"{rows} rows are more than the {max_rows} of one forward")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.rules.slots:
            raise Unsupported(f"slot {slot} is not one of {self.rules.slots}")

    def _check_segment(self, segment: Segment, max_context: int) -> None:
        self._check_slot(segment.slot)
        if not segment.tokens:
            raise Unsupported(f"slot {segment.slot}: a segment needs at least one token")
        if not self._fixed.get(segment.slot, 0) <= segment.start <= self.count_cached_positions(segment.slot):
            raise Unsupported(
                f"slot {segment.slot}: start {segment.start} is not between the {self._fixed.get(segment.slot, 0)} "
                f"positions it shares and the {self.count_cached_positions(segment.slot)} it holds"
            )
        if segment.start + len(segment.tokens) > max_context:
            raise Unsupported(
                f"slot {segment.slot}: {segment.start + len(segment.tokens)} positions are more than the "
                f"context of {max_context}"
            )
        first, last = segment.rows
        if not 0 <= first <= last <= len(segment.tokens):
            raise Unsupported(f"slot {segment.slot}: rows {segment.rows} are not within its tokens")

    def _blocks_for(self, segment: Segment) -> int:
        return ceil_div(segment.start + self.count_padded_rows(segment), self.block_tokens)
