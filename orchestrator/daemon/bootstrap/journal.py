"""The book of answers that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.config.model import ClusterConfig
from orchestrator.daemon.journal.book import AnswerBook, BookLimits


def build_book(config: ClusterConfig, state: Path, clock: Clock) -> AnswerBook:
    """Return the book, with its files in the daemon's own directory `state`."""
    asked = config.journal
    limits = BookLimits(int(asked.memory), asked.ended_s, asked.detached_s, asked.sync_s, int(asked.reserve))
    return AnswerBook(limits, clock, state / "journal" if asked.enabled else None)
