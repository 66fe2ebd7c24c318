"""What benchmarks that compare outputs do with a result: the machine beside it, a file, a table, and a refusal."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider_lab.bench.errors import BenchError


def check_json_path(json_out: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured. Raises BenchError."""
    if json_out is not None and not json_out.resolve().parent.is_dir():
        raise BenchError(f"--json {json_out}: there is no such directory")


def describe_machine() -> dict[str, Any]:
    """Return what a result was measured with."""
    from adapters.hardware import processor

    return {
        "outrider": version("outrider"),
        "python": platform.python_version(),
        "processor": processor().name,
        "cpus": os.cpu_count(),
    }


def finish_comparison(result: dict[str, Any], json_out: Path | None, show: Callable[[dict[str, Any]], None]) -> None:
    """Add the environment, write and show a result. Raises BenchError where its outputs are not identical."""
    result["environment"] = describe_machine()
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    show(result)
    if not result["summary"]["identical"]:
        raise BenchError("outputs differ from the target's own")
