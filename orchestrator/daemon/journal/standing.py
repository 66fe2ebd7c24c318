"""How the journal stands: what it keeps, what it cannot keep and why, and what gives way on a full disk. No effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from device_profiles.units import human_bytes
from orchestrator.daemon.journal.records import HEADER_BYTES

ProblemKind = Literal["not_written", "left_out", "memory", "reserve"]
PROBLEM_KINDS: tuple[ProblemKind, ...] = ("not_written", "left_out", "memory", "reserve")


@dataclass(frozen=True, slots=True)
class JournalProblem:
    """Something that the journal does not keep, or may not: which kind, and in words."""

    kind: ProblemKind
    text: str


@dataclass(frozen=True, slots=True)
class JournalView:
    """How it stands: answers that are kept, running ones that are not in the files, their bytes in memory, the bytes
    of the disk that are to be allocated and those that are, and what is wrong."""

    answers: int = 0
    left_out: int = 0
    memory_bytes: int = 0
    reserve_bytes: int = 0
    allocated_bytes: int = 0
    problems: tuple[JournalProblem, ...] = ()


def list_problems(
    refused: str, short: str, left_out: int, sizes: tuple[int, int], *, refuses: bool
) -> tuple[JournalProblem, ...]:
    """Return what is wrong, the worst first. `refused`: why nothing is written; `short`: why less is allocated than is
    to be; `left_out`: running answers that are in no file; `sizes`: what is to be allocated, and what is; `refuses`:
    lately there was an answer that memory had no room for."""
    wanted, allocated = map(human_bytes, sizes)
    whole = f"{allocated} of {wanted} (journal.reserve) could be allocated ({short}): a full disk may stop the journal"
    rest = f"{left_out} running answers do not fit into journal.reserve: they would not outlive the daemon"
    problems: tuple[tuple[ProblemKind, object, str], ...] = (
        ("not_written", refused, f"answers are not written ({refused}): streams would not outlive the daemon"),
        ("left_out", left_out, f"the disk is full, and {rest}"),
        ("memory", refuses, "journal.memory is full of running answers: newer ones cannot be resumed"),
        ("reserve", short, whole),
    )
    return tuple(JournalProblem(kind, text) for kind, holds, text in problems if holds)


def choose_bodies(bodies: Sequence[bytes], wanted: Iterable[int], room_bytes: int) -> set[int]:
    """Return which records fit into so many bytes; `wanted` are their indices, the dearest first."""
    kept: set[int] = set()
    for index in wanted:
        size = HEADER_BYTES + len(bodies[index])
        if size <= room_bytes:
            room_bytes -= size
            kept.add(index)
    return kept
