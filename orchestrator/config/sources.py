"""What the sources of a configuration were found to be, so that whoever reads it later finds the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adapters.model_identity import ModelIdentity
from adapters.model_source import pin_source


@dataclass(frozen=True, slots=True)
class FoundSources:
    """`bound`: models of the hub with their commit, by what the file says. `identities`: the content that a model is to
    have from now on, by its bound source; the others have what they had when they were loaded first."""

    bound: Mapping[str, str] = field(default_factory=dict)
    identities: Mapping[str, ModelIdentity] = field(default_factory=dict)

    def bind(self, source: str) -> str:
        """Return a source with a model of the hub bound to a commit: the known one, else that of now. Raises as
        `pin_source`."""
        return self.bound.get(source) or pin_source(source)


NOT_LOOKED: FoundSources = FoundSources()
