"""Makes the statistics of a model: lets it write as much as is asked for, and counts that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import PACKAGE_PREFIX
from adapters.tokenizer import load_tokenizer
from device_profiles.profile import Exactness
from orchestrator.config.drafts import SuffixDraft
from orchestrator.config.load import default_config_path
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.generating.data import DataError, Shards, TargetFacts, Text
from orchestrator.generating.document_index import find_target
from orchestrator.generating.generate import Generator, Settings, interruptible
from orchestrator.generating.progress import ConsoleShow
from orchestrator.generating.prompts import KINDS, Wishes, wish, wish_given, wish_over
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.drafting.counts import (
    Positions,
    build_entries,
    count_contexts,
    is_held_out,
    list_positions,
    measure_agreement,
)
from orchestrator.worker.drafting.statistics import StatisticsCard, write_statistics
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource, load_target
from orchestrator.worker.loading.statistics import place_statistics


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


@dataclass(frozen=True, slots=True)
class StatisticsJob:
    """What to build. `data` and `output` None: in the model store. `prompts` and `documents`: what the operator gave to
    write about; neither: broad prompts. `entries` bounds the table."""

    settings: Settings
    config: Path | None = None
    model: str = ""
    data: Path | None = None
    output: Path | None = None
    entries: int = 1_000_000
    prompts: Sequence[str] = ()
    documents: Sequence[str] = ()

    @property
    def given(self) -> str:
        """A digest of what the operator gave; "" for nothing."""
        whole = "\0".join([*self.prompts, "", *self.documents])
        return blake2b(whole.encode(), digest_size=8).hexdigest() if self.prompts or self.documents else ""


def build_statistics(job: StatisticsJob, show: ConsoleShow) -> dict[str, Any]:
    """Let the target write what is missing, count all there is, write the statistics and return what they are. A run
    that is interrupted once counts what there is. Raises ConfigError, DataError, and what loading a target raises."""
    options = read_writer_options(job.config, job.model, job.settings.concurrency)
    shards = Shards(job.data) if job.data is not None else None
    if shards is None or _count_tokens(shards) < job.settings.tokens:
        shards = _write_texts(job, options, shards, show)
    with show.stage("counting"):
        return _count_texts(job, options, shards)


def _count_tokens(shards: Shards) -> int:
    return sum(len(text.top_ids) for text in shards.texts())


def _write_texts(job: StatisticsJob, options: EngineOptions, shards: Shards | None, show: ConsoleShow) -> Shards:
    with show.stage("loading the target"):
        target = load_target(options, lambda _stage, _fraction: None)
    try:
        tokenizer = load_tokenizer(target.tokenizer_dir)
        base = (job.config or default_config_path()).resolve().parent
        facts = replace(describe_target(target, base, sorted(tokenizer.eos_ids)), prompts=job.given)
        if shards is None:
            shards = Shards(_default_path(options, facts).with_suffix(f".data{'-' * bool(job.given)}{job.given}"))
        shards.bind(facts)
        loop = build_loop(target, options, build_drafter(options, target))
        generator = Generator(loop, tokenizer, shards, job.settings, _choose_wishes(job))
        wanted = job.settings.tokens
        with interruptible() as stopped, show.tokens(generator.labelled, wanted) as tell:
            generator.run(tell, stopped)
    finally:
        target.model.close()
    return shards


def _choose_wishes(job: StatisticsJob) -> Wishes:
    if job.prompts:
        return wish_given(job.prompts)
    return wish_over(job.documents) if job.documents else wish


def _default_path(options: EngineOptions, facts: TargetFacts) -> Path:
    return place_statistics(Path(options.model.store).expanduser(), facts.name, facts.vocabulary_fingerprint)


def _count_texts(job: StatisticsJob, options: EngineOptions, shards: Shards) -> dict[str, Any]:
    facts = shards.target()
    texts = list(shards.texts())
    everything = list_positions(texts)
    if not len(everything.labels):
        raise DataError(f"{shards.directory}: the target has written nothing yet; give it more --minutes")
    held_out = _split_kinds([text for text in texts if is_held_out(text.number)], facts)
    # What the target asks itself is the least like its neighbours: prompts of one template resemble each other.
    judged = held_out.get(KINDS[0]) or list_positions([text for text in texts if is_held_out(text.number)])
    without = count_contexts(list_positions([text for text in texts if not is_held_out(text.number)]))
    entries = build_entries(count_contexts(everything), without, judged, job.entries)
    card = StatisticsCard(
        prompts=facts.prompts or "broad",
        built=datetime.now(UTC).date().isoformat(),
        texts=len(texts),
        tokens=len(everything.labels),
        held_out=sum(len(positions.labels) for positions in held_out.values()),
        agreement=measure_agreement(without, held_out),
    )
    path = job.output or _default_path(options, facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_statistics(path, entries, model=facts.name, vocabulary=facts.vocabulary_fingerprint, card=card)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}; name another --output") from error
    return {
        "path": str(path.resolve()),
        "kept_beside_model": job.output is None,
        "model": facts.name,
        "data": str(shards.directory.resolve()),
        "texts": card.texts,
        "tokens": card.tokens,
        "entries": len(entries.keys),
        "bytes": path.stat().st_size,
        "agreement": card.agreement,
    }


def _split_kinds(texts: Sequence[Text], facts: TargetFacts) -> dict[str, Positions]:
    by_kind: dict[str, list[Text]] = {}
    for text in texts:
        by_kind.setdefault("given" if facts.prompts else KINDS[text.number % len(KINDS)], []).append(text)
    return {kind: list_positions(some) for kind, some in sorted(by_kind.items())}
