"""The `outrider` program. `outrider status` is there at once: for its usual options nothing of the other commands is
imported, not even what reads their options. All else is `orchestrator.cli.main`'s, and so is each failure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple


class StatusOptions(NamedTuple):
    config: Path | None = None
    port: int | None = None
    socket: Path | None = None
    as_json: bool = False


def main() -> None:
    options = read_options(sys.argv[1:])
    if options is not None and _show(options):
        return
    from orchestrator.cli.main import main as run

    run()


def read_options(arguments: list[str]) -> StatusOptions | None:
    """Return what `outrider status` is asked for; None where that is for the full command line to read."""
    if arguments[:1] != ["status"] or "OUTRIDER_URL" in os.environ:
        return None
    options = StatusOptions()
    rest = iter(arguments[1:])
    for name in rest:
        if name == "--json":
            options = options._replace(as_json=True)
            continue
        value = next(rest, "")
        if name == "--port" and value.isdecimal():
            options = options._replace(port=int(value))
        elif name == "--config" and value:
            options = options._replace(config=Path(value))
        elif name == "--socket" and value:
            options = options._replace(socket=Path(value))
        else:
            return None
    return options


def _show(options: StatusOptions) -> bool:
    """Print the status; False where that failed: the full command line says why."""
    from orchestrator.cli.status_show import show_status
    from orchestrator.config.socket_place import guess_socket
    from orchestrator.errors import OutriderError

    try:
        path = options.socket or guess_socket(options.config, options.port)
        if path is None:
            return False
        show_status(path, as_json=options.as_json)
    except OutriderError:
        return False
    except KeyboardInterrupt:
        sys.exit(130)
    return True


if __name__ == "__main__":
    main()
