"""Progress of a target that writes, as a line for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


class ConsoleShow:
    def __init__(self) -> None:
        self.console = Console(stderr=True)

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return self.console.status(f"{name} ...")

    @contextmanager
    def tokens(self, done: int, wanted: int) -> Iterator[Callable[[int], None]]:
        """Show so many tokens of those that are wanted; give a function that tells how many there are now."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task("tokens", total=wanted, completed=done)
            yield lambda count: progress.update(task, completed=count)
