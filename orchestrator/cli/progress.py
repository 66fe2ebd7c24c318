"""Progress of work that tells it, as a line for people."""

from __future__ import annotations

from typing import Any


def show_progress(work: Any) -> dict[str, Any]:
    """Run work that tells its progress, show that, and return what it found."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:

        def progress(stage: str, fraction: float) -> None:
            status.update(f"{stage} ..." if fraction < 0 else f"{stage}: {fraction:.0%}")

        found: dict[str, Any] = work(progress)
    return found
