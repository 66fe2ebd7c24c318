"""What each user was answered of late: texts to draft their next answer from, whichever worker makes it.

A worker remembers everybody's answers together. On a busy one a user's own last answers are soon gone, and another
replica never had them. So the daemon keeps the newest of each user tag, of each API key by itself, in memory alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.clock import Clock
from orchestrator.daemon.control.port import RecentOutputsView
from orchestrator.daemon.draft_store.codec import MAX_ENTRY_TOKENS
from orchestrator.daemon.draft_store.service import MIN_TOKENS, MOST_ANSWERS, MOST_TOKENS
from orchestrator.protocol.packed_tokens import BYTES_PER_TOKEN, pack_tokens

MOST_USERS = 512
"""Of whom answers are remembered: those who asked last. ADR 0072. Not tuned."""
KEPT_S = 3600.0
"""An answer that is older is not used. ADR 0072. Not tuned."""


@dataclass(slots=True)
class _Answers:
    newest_s: float
    texts: deque[bytes] = field(default_factory=lambda: deque(maxlen=MOST_ANSWERS))


class RecentOutputs:
    """The last four answers of each user, their first 1024 tokens: 8 MiB at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._users: OrderedDict[tuple[str, str], _Answers] = OrderedDict()
        self._given = 0

    def keep(self, owner: str, user: str, answer: Sequence[int]) -> None:
        """Remember an answer to the user with this tag, of the key of this id."""
        if not user or len(answer) < MIN_TOKENS:
            return
        now_s = self._clock.monotonic_s()
        answers = self._users.setdefault((owner, user), _Answers(now_s))
        answers.newest_s = now_s
        answers.texts.appendleft(pack_tokens(answer[:MAX_ENTRY_TOKENS]))
        self._users.move_to_end((owner, user))
        if len(self._users) > MOST_USERS:
            self._users.popitem(last=False)

    def find_answers(self, owner: str, user: str) -> list[bytes]:
        """Return what this user was answered of late, as packed tokens, the newest first."""
        answers = self._users.get((owner, user))
        if not user or answers is None:
            return []
        if self._clock.monotonic_s() - answers.newest_s > KEPT_S:
            del self._users[owner, user]
            return []
        self._given += 1
        return [*answers.texts]

    def view(self) -> RecentOutputsView:
        """Return how much is remembered, and what for."""
        length_bytes = sum(len(text) for answers in self._users.values() for text in answers.texts)
        return RecentOutputsView(len(self._users), length_bytes // BYTES_PER_TOKEN, self._given)


def join_answers(own: Sequence[bytes], alike: Sequence[bytes]) -> list[bytes]:
    """Return a user's own answers and those to prompts alike (each the likeliest first), within the bounds of what a
    request is given. What answers prompts alike goes first: it is in the user's own where they asked so before."""
    texts: list[bytes] = []
    room = MOST_TOKENS * BYTES_PER_TOKEN
    for text in dict.fromkeys([*alike[: MOST_ANSWERS // 2], *own, *alike]):
        if len(texts) < MOST_ANSWERS and room > 0:
            texts.append(text[:room])
            room -= len(texts[-1])
    return texts
