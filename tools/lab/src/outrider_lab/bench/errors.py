"""What a benchmark raises."""

from __future__ import annotations

from orchestrator.worker.measuring.prompts import MeasurementError


class BenchError(MeasurementError):
    """The benchmark cannot run as asked, or what it measured is not what it must be."""
