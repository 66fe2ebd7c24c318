"""What the next forward holds: who decodes, who prefills, and how many rows each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapters.contract import Segment
from orchestrator.decoding.session import Session


@dataclass(frozen=True, slots=True)
class Part:
    """One session's share of a forward: `known` committed tokens, then its draft. `samples`: the last known
    token is in it, so that its row (and the drafts' rows) choose tokens."""

    session: Session
    known: int
    samples: bool

    @property
    def apart(self) -> bool:
        """The numerical class of its rows (see adapters.contract.Capabilities.apart_tokens)."""
        return self.session.apart and self.session.prompt_left == 0

    @property
    def drafts(self) -> bool:
        """True where draft rows may follow: not where they would be of another class than the rows before them."""
        return self.samples and (self.apart or not self.session.apart)

    @property
    def rows(self) -> int:
        """Rows that are run, drafts included, padding not."""
        return self.known + (len(self.session.draft.tokens) if self.samples else 0)

    def segment(self) -> Segment:
        """Return what the adapter runs."""
        session = self.session
        start = session.cached
        tokens = [
            *session.tokens[start : start + self.known],
            *(session.draft.tokens if self.samples else ()),
        ]
        rows = (self.known - 1, len(tokens)) if self.samples else (0, 0)
        return Segment(session.slot, start, tokens, rows, self.apart)


def plan(running: Sequence[Session], *, max_rows: int, prefill_rows: int, paid_rows: int) -> list[Part]:
    """Share the rows of one forward: first every decoding session, then prefills.

    Drafts are added later, into rows that are left; a session for which no row is left waits a round. Prefills
    get `prefill_rows` beside decoding sessions, all rows where there are none. A prefill whose next rows another
    one computes in this forward waits for them.
    """
    parts: list[Part] = []
    left = max_rows
    for session in running:
        if session.uncached == 1 and left >= paid_rows:
            parts.append(Part(session, 1, samples=True))
            left -= paid_rows
    if parts:
        left = min(left, prefill_rows)
    filling = [session for session in running if session.uncached > 1]
    for session in filling:
        if left < paid_rows:
            break
        if any(_same_rows(part.session, session) for part in parts):
            continue
        known = min(session.prompt_left or session.uncached, left)
        parts.append(Part(session, known, samples=known == session.uncached))
        left -= max(known, paid_rows)
    return parts


def _same_rows(ahead: Session, behind: Session) -> bool:
    """True where waiting saves work: `ahead` is about to compute the block that `behind` needs next."""
    end = behind.cached + behind.block_tokens
    return (
        ahead.cached == behind.cached
        and end <= min(ahead.shared_limit, behind.shared_limit)
        and ahead.tokens[:end] == behind.tokens[:end]
    )


def paid(part: Part, alone: bool, paid_rows: int) -> int:
    """Return the rows that a part is charged for at least; `alone`: nothing else is in the forward."""
    return 1 if part.apart and not alone else paid_rows


def rows_of(parts: Sequence[Part], paid_rows: int) -> int:
    """Return the rows that a forward of these parts is charged for, drafts included."""
    alone = len(parts) == 1
    return sum(max(paid(part, alone, paid_rows), part.rows) for part in parts)
