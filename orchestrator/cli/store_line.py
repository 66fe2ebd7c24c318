"""What the model store takes, in a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from device_profiles.units import human_bytes

PRUNE = "outrider models prune"


def format_store(store: Mapping[str, Any]) -> str:
    """Return a line about a store as `outrider status --json` has it."""
    used = f"{human_bytes(store['used_bytes'])} in use by the configuration"
    could_go = f", {human_bytes(store['unused_bytes'])} could go (`{PRUNE}`)" if store["unused"] else ""
    return f"{format_total(store)}: {used}{could_go}"


def format_total(store: Mapping[str, Any]) -> str:
    """Return how much there is, and of how many models."""
    return f"{human_bytes(store['total_bytes'])} in {store['root']}, of {store['sources']} source(s)"
