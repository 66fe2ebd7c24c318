"""What the journal keeps, and what it cannot keep, as metrics."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.journal.standing import PROBLEM_KINDS, JournalView


class JournalSeries:
    """`source`: None where answers are not kept."""

    def __init__(self, make: Registered) -> None:
        self.source: Callable[[], JournalView] | None = None
        self._answers = make.gauge("journal_answers", "Answers that may be resumed.")
        self._wanted = make.gauge("journal_reserve_bytes", "Bytes of the disk that are to be allocated ahead.")
        self._allocated = make.gauge("journal_allocated_bytes", "Bytes of the disk that are.")
        self._problems = make.gauge("journal_problems", "1 while it cannot keep something, or may not.", "kind")

    def refresh(self, of: Engine) -> None:
        """Tell what is so now."""
        if self.source is None:
            return
        view = self.source()
        kinds = {problem.kind for problem in view.problems}
        self._answers.labels(*of).set(view.answers)
        self._wanted.labels(*of).set(view.reserve_bytes)
        self._allocated.labels(*of).set(view.allocated_bytes)
        for kind in PROBLEM_KINDS:
            self._problems.labels(*of, kind).set(kind in kinds)
