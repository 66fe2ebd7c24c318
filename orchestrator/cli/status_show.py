"""Prints a daemon's status once."""

from __future__ import annotations

import sys

from orchestrator.cli.daemon_socket import Place, fetch_page, query_daemon


def show_status(path: Place, *, as_json: bool) -> None:
    """Print what a daemon says of itself. Raises StatusError."""
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.format(fetch_page(path, "/admin/status"), indent=1).decode() + "\n")
        return
    from orchestrator.cli.status import MOST_ROWS, build_tables

    answer = query_daemon(path, f"/admin/status?most_devices={MOST_ROWS}")
    from rich.console import Console

    console = Console()
    for table in build_tables(answer):
        console.print(table)
