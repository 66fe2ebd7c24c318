"""Progress of a comparison, for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.bench.compare.turns import Tell


@contextmanager
def show_turns() -> Iterator[Tell]:
    """Show what is being done, with a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1)

        def tell(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield tell
