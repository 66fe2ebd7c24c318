"""Whether systemd's journal has this process's log, and as which unit's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_USUAL_UNIT: Final = "outrider.service"
_STANDARD_ERROR: Final = 2  # Unix's
_CGROUP: Final = Path("/proc/self/cgroup")


def find_journal_unit() -> str:
    """Return the unit whose journal standard error goes to; "" where it goes elsewhere."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(_STANDARD_ERROR)
        if stream != f"{status.st_dev}:{status.st_ino}":
            return ""
        units = re.findall(r"([^/\n]+\.service)(?:/[^/\n]*)?$", _CGROUP.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return units[-1] if units else _USUAL_UNIT
