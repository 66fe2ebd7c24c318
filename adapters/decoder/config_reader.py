"""Values of a config.json by key, each checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.contract import ModelRefused
from adapters.decoder.spec import MOST_COUNT

_MOST_NUMBER = 1e30  # more is damage


class ConfigReader:
    """Values of a config by key, checked; what is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str) -> Any:
        """Return a value as it is, None where there is none."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, most: int = MOST_COUNT) -> int:
        """Return a whole number from 1. Raises ModelRefused."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.build_refusal(key, f"{value!r} is no whole number from 1 to at most {most}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """Return a number of zero or more, or above zero where it is to be `positive`. Raises ModelRefused."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_NUMBER:
            raise self.build_refusal(key, f"{value!r} is no number of zero or more")
        if positive and not value:
            raise self.build_refusal(key, "it is 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return whether a key is true; it is not where it is absent. Raises ModelRefused."""
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.build_refusal(key, f"{value!r} is neither true nor false")
        return bool(value)

    def _present(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.build_refusal(key, "it is missing")
        return value

    def build_refusal(self, key: str, reason: str) -> ModelRefused:
        """Return the refusal of the file for what one of its keys says."""
        return ModelRefused(f"{self.where}: {key}: {reason}. Choose another model, or mend the file.")
