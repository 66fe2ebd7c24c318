"""How many modules there are to read for one round of the decode loop. Adapters, drafters and KV moves come to the loop
from outside, behind their contracts."""

from __future__ import annotations

import subprocess
import sys

ENTRY = "orchestrator.worker.engine.loop"
BAR = 70
PACKAGES = ("adapters.", "device_profiles.", "orchestrator.", "policies.")


def list_reached(entry: str) -> list[str]:
    """Return the modules of ours that importing one of them brings in, packages aside."""
    listing = "import sys; print(*(name for name, module in sys.modules.items() if not hasattr(module, '__path__')))"
    code = f"import {entry}; {listing}"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return sorted(name for name in names if name.startswith(PACKAGES))


def test_a_round_reaches_few_modules() -> None:
    modules = list_reached(ENTRY)
    print(f"{len(modules)} modules are reached by one round; the bar is {BAR}", *modules, sep="\n")  # noqa: T201
    assert len(modules) <= BAR
