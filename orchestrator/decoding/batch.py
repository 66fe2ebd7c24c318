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

    def segment(self) -> Segment:
        """Return what the adapter runs."""
        session = self.session
        start = session.cached
        tokens = [
            *session.tokens[start : start + self.known],
            *(session.draft.tokens if self.samples else ()),
        ]
        rows = (self.known - 1, len(tokens)) if self.samples else (0, 0)
        return Segment(session.slot, start, tokens, rows)


def plan(running: Sequence[Session], *, max_rows: int, prefill_rows: int, paid_rows: int) -> list[Part]:
    """Share the rows of one forward: first every decoding session, then prefills in order of admission.

    Drafts are added later, into rows that are left; a session for which no row is left waits a round. Prefills
    get `prefill_rows` beside decoding sessions, all rows where there are none.
    """
    parts: list[Part] = []
    left = max_rows
    decoding = [session for session in running if session.uncached == 1]
    for session in decoding:
        if left >= paid_rows:
            parts.append(Part(session, 1, samples=True))
            left -= paid_rows
    if parts:
        left = min(left, prefill_rows)
    for session in running:
        known = min(session.uncached, left)
        if session.uncached > 1 and left >= paid_rows:
            parts.append(Part(session, known, samples=known == session.uncached))
            left -= max(known, paid_rows)
    return parts


def rows_of(parts: Sequence[Part], paid_rows: int) -> int:
    """Return the rows that a forward of these parts is charged for, drafts included."""
    return sum(max(paid_rows, part.known + (len(part.session.draft.tokens) if part.samples else 0)) for part in parts)
