"""A draft model's KV cache: which slot holds which sequence, how far, and what goes back when the target rejects.

Nothing is copied to roll back: what the slot holds behind `held` is overwritten by the next forward. Where the model
has fewer slots or blocks than there are sequences, those that were asked for least recently give theirs up.

Of a long text only the end is read, as if the text began there: drafts of it are nearly as often right (ADR 0151), and
nothing of the output depends on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from adapters.contract import CapacityError, ForkableKv, LoadedHead, LoadedModel, Segment
from orchestrator.worker.drafting.port import NO_SLOT
from policies.running_mean import update_mean
from policies.sampling import Row, Sampling
from policies.sampling.penalties import Penalties
from policies.serving.prefill_budget import observe_prefill, rows_within

# Weight of the newest forward in what one takes that reads nothing. Not tuned.
_NEWEST = 0.1
# ADR 0016: prompts get on by so many rows a round, whatever they take. Not tuned.
_LEAST_ROWS = 32
# Tokens behind which a sequence counts as followed: a verdict of `num_speculative_tokens` (12) and some. Not tuned.
_FOLLOWING = 16
_CLOSE_BEHIND = 66
"""A sequence with so few tokens to feed is not prefilled but follows its verdicts: that is never put off. ADR 0085: a
verdict on 64 predicted tokens leaves as many and two more."""


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One sequence, as the draft model knows it.

    The slot holds the first `held` of `tokens`, less the first `skipped`, and the `guessed` tokens behind where that is
    all of them. What is before `fixed` is shared and cannot be rolled back. Of what is to be read the last `window`
    tokens suffice. Rows behind `prompt` are of a class of their own where
    `apart` (see adapters.contract.Capabilities.apart_tokens). `counts` are the generated tokens, for penalties.
    `source`: the slot of the target that a head reads of it (adapters.contract.LoadedHead).
    """

    key: str
    tokens: list[int]
    sampling: Sampling
    prompt: int
    apart: bool
    penalties: Penalties | None
    counts: dict[int, int] = field(default_factory=dict)
    slot: int = NO_SLOT
    held: int = 0
    fixed: int = 0
    guessed: list[int] = field(default_factory=list)
    window: int = sys.maxsize
    skipped: int = 0
    asked_round: int = 0
    source: int = NO_SLOT

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens were committed: guesses among them stay fed, the others are rolled back."""
        if self.penalties is not None:
            for token in tokens:
                self.counts[token] = self.counts.get(token, 0) + 1
        right = count_common_prefix(self.guessed, tokens) if self.held == len(self.tokens) else 0
        self.held += right
        self.guessed = self.guessed[right:] if right == len(tokens) else []
        self.tokens.extend(tokens)

    def goes_on_from(self, drafted: Sequence[int]) -> bool:
        """True where only the last of these tokens behind the committed ones is still to be fed."""
        return self.slot != NO_SLOT and self.held == len(self.tokens) and self.guessed == list(drafted[:-1])

    @property
    def follows(self) -> bool:
        """True where it has a slot and only verdicts to follow, no prompt to read."""
        return self.slot != NO_SLOT and self.missing <= _FOLLOWING

    @property
    def missing(self) -> int:
        """Tokens that have to be fed before the next can be drafted: the last one at least, for its logits."""
        return min(len(self.tokens) - min(self.held, len(self.tokens) - 1), self.window)

    @property
    def positions(self) -> int:
        """Those of its slot that its text takes, once that is read."""
        return len(self.tokens) - self.skipped if self.slot != NO_SLOT else min(len(self.tokens), self.window)


@dataclass(frozen=True, slots=True)
class _Feed:
    """Tokens for a sequence's slot, behind `start`; `wanted`: the logits behind the last. `close`: what is missing is
    little, and no prefill."""

    known: DraftSequence
    start: int
    tokens: Sequence[int]
    wanted: bool
    close: bool = True

    @property
    def segment(self) -> Segment:
        known = self.known
        rows = (len(self.tokens) - 1, len(self.tokens)) if self.wanted else (0, 0)
        position = self.start - known.skipped
        return Segment(known.slot, position, self.tokens, rows, known.apart and self.start >= known.prompt)


class DraftCache:
    """See the module. `prefill_ms` bounds what prefill may take in one round. Raises what the model raises but
    CapacityError."""

    def __init__(self, model: LoadedModel, *, prefill_ms: float) -> None:
        self._model = model
        self._forks = model if isinstance(model, ForkableKv) else None
        self._head = model if isinstance(model, LoadedHead) else None
        self._prefill_ms = prefill_ms
        self._close_ms = 0.0  # a forward that reads nothing
        self._row_ms: float | None = None
        self._least_row_ms: float | None = None
        self._free = list(range(model.capabilities.slots - 1, -1, -1))
        self._seated: list[DraftSequence] = []
        self._rounds = 0

    @property
    def row_ms(self) -> float:
        """What a row of a text that is read takes at best; 0 where none was read. A mean would be that of a moment in
        which something else took the processor, for as long as nothing is read because of it."""
        return self._least_row_ms or self._row_ms or 0.0

    def catch_up(
        self,
        sequences: Sequence[DraftSequence],
        beside: Sequence[DraftSequence] = (),
        guessed: Mapping[DraftSequence, int] | None = None,
    ) -> dict[DraftSequence, Row]:
        """Feed what the sequences are behind, within a round's bound; returns the logits behind the last token of
        those that are then caught up. The rest goes on in the next round. `beside`: who else drafts in this round.
        Of these `guessed` is fed in the first forward, as by `step`."""
        self._rounds += 1
        for known in (*sequences, *beside):
            known.asked_round = self._rounds
        going = [known for known in sequences if self._seat(known)]
        most = self._model.capabilities.max_batch_rows
        least = min(_LEAST_ROWS, most)
        left = rows_within(self._row_ms, decode_ms=self._close_ms, bound_ms=self._prefill_ms, most=most, least=least)
        rows_of: dict[DraftSequence, Row] = {}
        steps = [_guess(known, token) for known, token in (guessed or {}).items()]
        while going or steps:
            feeds, steps = steps, []
            for known in sorted(going, key=lambda known: known.missing):
                close = known.missing <= _CLOSE_BEHIND
                rows = min(known.missing, most if close else left)
                if rows:
                    feeds.append(_behind(known, rows, close=close))
                    left -= 0 if close else len(feeds[-1].tokens)
            going = []
            for known, wanted in self._run(feeds):
                self._share(known)
                if wanted is None:
                    going.append(known)
                else:
                    rows_of[known] = wanted
        return rows_of

    def read(self, known: DraftSequence) -> None:
        """Feed a sequence as far as the model takes it in one forward, whatever that takes, as a prefill."""
        if self._seat(known):
            rows = min(len(known.tokens), self._model.capabilities.max_batch_rows)
            self._run([_behind(known, rows, close=False)])

    def step(self, guessed: Mapping[DraftSequence, int]) -> dict[DraftSequence, Row]:
        """Feed a guessed token to each sequence; returns the logits behind it, of those that had room."""
        feeds = [_guess(known, token) for known, token in guessed.items()]
        return {known: row for known, row in self._run(feeds) if row is not None}

    def drop(self, known: DraftSequence) -> None:
        if known.slot == NO_SLOT:
            return
        self._model.release(known.slot)
        self._free.append(known.slot)
        self._seated.remove(known)
        known.slot = NO_SLOT
        known.held = known.fixed = known.skipped = 0
        known.guessed = []

    def take_over(self, known: DraftSequence, before: DraftSequence) -> None:
        """A sequence is begun anew: let it have the slot of the one before, as far as both begin alike."""
        if before.slot == NO_SLOT:
            return
        held = min(before.held, count_common_prefix(before.tokens, known.tokens))
        if held < before.fixed:
            self.drop(before)
            return
        if held >= before.prompt:  # rows behind that prompt stay rows behind a prompt
            known.prompt, known.apart = before.prompt, before.apart
        self._seated[self._seated.index(before)] = known
        known.slot, known.held, known.fixed, known.asked_round = before.slot, held, before.fixed, before.asked_round
        known.skipped = before.skipped
        before.slot = NO_SLOT

    def fork(self, known: DraftSequence, source: DraftSequence) -> bool:
        """Give a sequence a slot that begins as another's goes on, as far as both have the same tokens. False: there
        is no room for it, or the model cannot."""
        if self._forks is None or source.slot == NO_SLOT or not self._free:
            return False
        fed = [*source.tokens[: source.held], *(source.guessed if source.held == len(source.tokens) else ())]
        held = min(count_common_prefix(fed, known.tokens), len(known.tokens) - 1)
        if held < source.held - 1 or held == 0:
            return False
        skipped = source.skipped
        kept = min(source.held, len(source.tokens) - 1, held) - skipped
        try:
            self._forks.fork(self._free[-1], source.slot, held - skipped, kept)
        except CapacityError:
            return False
        size = self._model.capabilities.block_tokens
        known.slot, known.held, known.skipped, known.asked_round = self._free.pop(), held, skipped, self._rounds
        known.fixed = skipped + kept // size * size
        source.fixed = max(source.fixed, known.fixed)
        self._seated.append(known)
        return True

    def _seat(self, known: DraftSequence) -> bool:
        """Give a sequence a slot, taking it from one that nobody asks for in this round. False: there is none."""
        if known.slot != NO_SLOT:
            known.guessed = []
            known.held = min(known.held, len(known.tokens) - 1)
            if len(known.tokens) - known.held <= known.window:
                return True
            self.drop(known)
        if not self._free and not self._evict(()):
            return False
        known.slot = self._free.pop()
        self._seated.append(known)
        limit = known.prompt if known.apart else len(known.tokens)
        known.held = known.fixed = self._model.attach(known.slot, known.tokens[:limit])
        if len(known.tokens) - known.held > known.window:
            self._model.release(known.slot)
            self._model.attach(known.slot, ())
            known.held = known.fixed = known.skipped = len(known.tokens) - known.window
        return True

    def _evict(self, kept: Iterable[DraftSequence]) -> bool:
        """Drop the sequence asked for least recently, of those that are not asked for now. False: there is none."""
        keep = set(kept)
        idle = [known for known in self._seated if known not in keep and known.asked_round < self._rounds]
        if idle:
            self.drop(min(idle, key=lambda known: known.asked_round))
        return bool(idle)

    def _share(self, known: DraftSequence) -> None:
        """Let later sequences begin with what was computed of a prompt. The last token never counts: it may have to be
        computed again."""
        size = self._model.capabilities.block_tokens
        whole = min(known.held, known.prompt, len(known.tokens) - 1) // size * size
        if whole > known.fixed and not known.skipped:
            self._model.share(known.slot, known.tokens[:whole])
            known.fixed = whole

    def _run(self, feeds: Sequence[_Feed]) -> list[tuple[DraftSequence, Row | None]]:
        """Run feeds in as few forwards as the model takes; returns each sequence that had room, with its logits
        where they were wanted."""
        done: list[tuple[DraftSequence, Row | None]] = []
        for group in self._groups(feeds):
            batch = self._with_room(group)
            while batch:
                if self._head is not None:
                    for known in (feed.known for feed in batch):
                        self._head.follow(known.slot, known.source, len(known.tokens))
                try:
                    result = self._model.forward([feed.segment for feed in batch])
                except CapacityError:
                    batch = self._with_room(batch, failed=True)
                    continue
                self._observe(batch, result.device_ms)
                left = result.logits.copy()  # they are valid until the next forward only
                for feed in batch:
                    _note(feed)
                    done.append((feed.known, left[0] if feed.wanted else None))
                    left = left[int(feed.wanted) :]
                break
        return done

    def _groups(self, feeds: Sequence[_Feed]) -> Iterator[list[_Feed]]:
        caps = self._model.capabilities
        group: list[_Feed] = []
        rows = 0
        for feed in feeds:
            more = max(len(feed.tokens), caps.min_rows)
            if group and rows + more > caps.max_batch_rows:
                yield group
                group, rows = [], 0
            group.append(feed)
            rows += more
        if group:
            yield group

    def _with_room(self, group: list[_Feed], *, failed: bool = False) -> list[_Feed]:
        """Return the feeds for which there are KV blocks, after others gave theirs up; `failed`: a forward found
        that there were too few, whatever the count says."""
        group = list(group)
        while group:
            missing = self._model.count_needed_blocks([feed.segment for feed in group]) - self._model.free_blocks()
            if missing <= 0 and not failed:
                break
            failed = False
            if not self._evict(feed.known for feed in group):
                self.drop(group.pop().known)
        return group

    def _observe(self, batch: Sequence[_Feed], forward_ms: float) -> None:
        prefill = [len(feed.tokens) for feed in batch if not feed.close]
        if not prefill:
            self._close_ms = update_mean(self._close_ms or forward_ms, forward_ms, _NEWEST)
            return
        self._row_ms = observe_prefill(
            self._row_ms,
            prefill_rows=sum(prefill),
            decode_ms=self._close_ms if len(prefill) < len(batch) else 0.0,
            forward_ms=forward_ms,
        )
        if len(prefill) == len(batch) and sum(prefill) >= _LEAST_ROWS:
            row_ms = forward_ms / sum(prefill)
            self._least_row_ms = min(self._least_row_ms or row_ms, row_ms)


def count_common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for token, other in zip(left, right, strict=False):
        if token != other:
            break
        count += 1
    return count


def _behind(known: DraftSequence, rows: int, *, close: bool) -> _Feed:
    """Return the next committed tokens to feed, `rows` at most; no feed reaches over the prompt's end where the rows
    behind it are of another class."""
    start = min(known.held, len(known.tokens) - 1)
    end = min(len(known.tokens), start + rows)
    if known.apart and start < known.prompt:
        end = min(end, known.prompt)
    return _Feed(known, start, known.tokens[start:end], end == len(known.tokens), close)


def _guess(known: DraftSequence, token: int) -> _Feed:
    return _Feed(known, known.held + len(known.guessed), [token], wanted=True)


def _note(feed: _Feed) -> None:
    known, committed = feed.known, len(feed.known.tokens)
    if feed.start >= committed:
        known.guessed.extend(feed.tokens)
        return
    known.held, known.guessed = feed.start + len(feed.tokens), []
