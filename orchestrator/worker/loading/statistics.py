"""Finds the statistics of a model: those that the configuration names, are kept beside the model, or ship for it."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from adapters.contract import ModelRefused
from orchestrator.protocol.load_options import ModelOptions, SuffixOptions
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.statistics import Statistics
from orchestrator.worker.loading.models import LoadedSource

_SUFFIX = ".statistics"
_PACKAGE, _DIRECTORY = "orchestrator.worker.drafting", "shipped"


class FoundStatistics(NamedTuple):
    statistics: Statistics | None = None
    reason: str = ""


NO_STATISTICS = FoundStatistics()


def place_statistics(store: Path, model: str, vocabulary: str) -> Path:
    """Return where a model's statistics are kept: in the model store, by its name and its vocabulary's fingerprint."""
    return store / "statistics" / _name_file(model, vocabulary)


def _name_file(model: str, vocabulary: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model)}-{vocabulary}{_SUFFIX}"


def find_statistics(options: SuffixOptions, model: ModelOptions, loaded: LoadedSource) -> FoundStatistics:
    """Return the statistics that a suffix drafter is to use for a loaded model. Those that were looked for unasked and
    are damaged cost drafts only. Raises ModelRefused where those that were named cannot be used."""
    vocabulary = loaded.model.spec.vocabulary_fingerprint
    if options.statistics == "none":
        return NO_STATISTICS
    if options.statistics != "auto":
        try:
            return FoundStatistics(Statistics(Path(options.statistics), vocabulary))
        except MappedFileUnusable as error:
            raise ModelRefused(f"{options.place}.statistics: {error}") from error
    names = dict.fromkeys((loaded.name, loaded.published_name))
    kept = [place_statistics(Path(model.store).expanduser(), name, vocabulary) for name in names]
    shipped = [Path(str(files(_PACKAGE) / _DIRECTORY / _name_file(name, vocabulary))) for name in names]
    reasons: list[str] = []
    for path in (*kept, *shipped):
        if not path.exists():
            continue
        try:
            return FoundStatistics(Statistics(path, vocabulary))
        except MappedFileUnusable as error:
            reasons.append(str(error))
    return FoundStatistics(None, "; ".join(reasons))
