"""A model prepared with its weights in a chosen number format: a recipe of the model store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapters.contract import Adapter, Progress
from device_profiles.profile import WeightsFormat


@dataclass(frozen=True, slots=True)
class Variant:
    """What `adapter` makes of a model with weights in the format `weights`; None keeps the file's own."""

    adapter: Adapter
    weights: WeightsFormat | None = None

    @property
    def name(self) -> str:
        """The name of the artefact's directory begins so."""
        return self.adapter.name

    def recipe(self) -> str:
        return self.adapter.recipe(self.weights)

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        self.adapter.prepare(source, target, progress, self.weights)
