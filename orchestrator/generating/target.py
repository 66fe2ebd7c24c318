"""The target as it writes data: as configured, but for many requests whose last bits do not matter."""

from __future__ import annotations

from pathlib import Path

from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import PACKAGE_PREFIX
from device_profiles.profile import Exactness
from orchestrator.config.drafts import SuffixDraft
from orchestrator.fitting.worker_options import engine_options
from orchestrator.generating.data import TargetFacts
from orchestrator.generating.document_index import find_target
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.models import LoadedSource


def read_writer_options(config: Path | None, model: str, concurrency: int) -> EngineOptions:
    """Return the options of a configured target (`model`: its name; "": the first) for so many requests at a time. Of
    its drafters, those from the text itself stay. Raises ConfigError."""
    chosen, path = find_target(config, model)
    changes = {
        "model": chosen.model.model_copy(update={"exactness": Exactness.KERNEL}),
        "limits": chosen.limits.model_copy(update={"max_running": concurrency}),
        "drafts": [
            draft.model_copy(update={"statistics": "auto"}) for draft in chosen.drafts if isinstance(draft, SuffixDraft)
        ],
    }
    return engine_options(chosen.model_copy(update=changes), path.resolve().parent)


def describe_target(target: LoadedSource, base: Path, end_ids: list[int]) -> TargetFacts:
    """Return what data says of who wrote it. `base`: the directory of the configuration, where a relative source
    begins."""
    spec, source = target.model.spec, target.source
    if not source.startswith((PACKAGE_PREFIX, HUB_PREFIX)):
        source = str((base / Path(source).expanduser()).absolute())
    return TargetFacts(
        source, target.name, spec.vocabulary_size, spec.vocabulary_fingerprint, spec.context_length, end_ids
    )
