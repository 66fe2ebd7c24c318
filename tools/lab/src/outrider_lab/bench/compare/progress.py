"""Progress of a comparison, for people and for logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from outrider_lab.bench.compare.turns import Tell


@contextmanager
def show_turns() -> Iterator[Tell]:
    """Show what is being done: with a bar on a terminal, else in a line for each stage, with the time since the
    beginning."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield tell_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1)

        def tell(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield tell


def tell_lines() -> Tell:
    """Return what writes a line to stderr when a stage begins."""
    began_s, last = time.monotonic(), ""

    def tell(stage: str, _done: int, _total: int) -> None:
        nonlocal last
        if stage != last:
            minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
            print(f"{minutes:d}:{seconds:02d} {stage}", file=sys.stderr, flush=True)
            last = stage

    return tell
