"""A process beside a daemon whose workers outlive it: where no next daemon comes, it ends those that did not end.

An orphan ends by itself, but for one that hangs in native code, or is stopped: nothing in it runs any more. The guard
reads the end of its daemon from a pipe. The next daemon ends the guard before it looks for workers.
"""

from __future__ import annotations

import os
import sys
import time

# For those that end by themselves. ADR 0050.
_PATIENCE_S = 5.0


def main() -> None:
    """Wait for the end of the pipe on standard input, and then as long as orphans do. Arguments: their directory, and
    how long they wait."""
    while os.read(0, 1024):
        pass
    time.sleep(float(sys.argv[2]) + _PATIENCE_S)
    # Loaded now: until then the guard is as small as it can be.
    from pathlib import Path

    from orchestrator.launch.homes import kill_all

    kill_all(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
