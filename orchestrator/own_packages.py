"""Where our packages are, for processes that the daemon starts."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def with_our_packages(environment: dict[str, str]) -> dict[str, str]:
    if _ROOT.name in ("site-packages", "dist-packages"):
        return environment
    known = environment.get("PYTHONPATH")  # a checkout that is not installed
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (known, str(_ROOT))))}
