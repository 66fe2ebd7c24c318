"""Finds the statistics of a model: those that the configuration names, are kept beside the model, or ship for it; and
those that grow while it serves."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from adapters.contract import ModelRefused
from orchestrator.clock import SystemClock
from orchestrator.protocol.load_options import ModelOptions, SuffixOptions
from orchestrator.worker.drafting.grown import GrownFile, GrownStatistics
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.statistics import MOST_TOKEN, Statistics
from orchestrator.worker.loading.models import LoadedSource

_SUFFIX = ".statistics"
_GROWN_SUFFIX = ".grown"
_PACKAGE, _DIRECTORY = "orchestrator.worker.drafting", "shipped"


class FoundStatistics(NamedTuple):
    statistics: Statistics | None = None
    reason: str = ""


NO_STATISTICS = FoundStatistics()


def place_statistics(store: Path, model: str, vocabulary: str) -> Path:
    """Return where a model's statistics are kept: in the model store, by its name and its vocabulary's fingerprint."""
    return store / "statistics" / _name_file(model, vocabulary)


def _name_file(model: str, content: str, suffix: str = _SUFFIX) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model)}-{content}{suffix}"


def open_grown_statistics(options: SuffixOptions, model: ModelOptions, loaded: LoadedSource) -> GrownStatistics | None:
    """Return the statistics that grow by what a loaded model says, in the model store by its content; None where
    nothing is to be counted."""
    spec = loaded.model.spec
    if options.growth == "none" or spec.vocabulary_size > MOST_TOKEN:
        return None
    content = loaded.identity.digest if loaded.identity is not None else spec.vocabulary_fingerprint
    path = Path(model.store).expanduser() / "statistics" / _name_file(loaded.name, content, _GROWN_SUFFIX)
    file = GrownFile(path, model=loaded.name, vocabulary=spec.vocabulary_fingerprint)
    return GrownStatistics(file, SystemClock(), shared=options.growth == "shared")


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
