"""How a draft's vocabulary goes with the target's, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from adapters.contract import ModelRefused
from adapters.hf_hub import HUB_PREFIX
from adapters.model_store import ModelStore
from adapters.tokenizer import load_tokenizer
from adapters.vocabulary import SIMULATED_PREFIX, vocabulary_at_hand, vocabulary_from, vocabulary_in
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.protocol.load_options import ModelDraftOptions, ModelOptions
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.drafting.retokenize import Bridge
from orchestrator.worker.drafting.translate import TranslatingDrafter
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.loading.prepared import OnProgress, find_model, prepare_own_tokenizer, silent
from policies.models.vocabulary import Match, compare, refusal


@dataclass(frozen=True, slots=True)
class VocabularyPair:
    """What a draft's vocabulary is to the target's, and the fingerprint that it has."""

    match: Match
    draft_fingerprint: str


def compare_vocabularies(
    draft: ModelDraftOptions, target: ModelOptions, progress: OnProgress = silent
) -> VocabularyPair:
    """Compare the vocabularies, downloading a model of the hub. Raises what `model_source.resolve` does, and
    ModelRefused where they differ and are not to be translated."""
    ours = _read_vocabulary(target, progress)
    theirs = _read_vocabulary(draft.model, progress, ours)
    return _pair(draft, ours, theirs)


def remote_pair(draft: ModelDraftOptions, target: ModelOptions, loaded: LoadedSource) -> VocabularyPair:
    """Compare the vocabularies of a target and a draft whose worker may be on another machine.

    Where the draft's files are not here and it is not to be translated, its worker has to say that its vocabulary is
    the target's own. Raises as `compare_vocabularies`.
    """
    ours, theirs = _read_vocabulary(target), None
    with nullcontext() if draft.translate else suppress(ModelRefused):
        theirs = _read_at_hand(draft.model, ours)
    if theirs is None and draft.translate:
        return compare_vocabularies(draft, target)
    if theirs is None:
        return VocabularyPair(Match.IDENTICAL, loaded.model.spec.vocabulary_fingerprint)
    return _pair(draft, ours, theirs)


def _read_at_hand(draft: ModelOptions, target: Sequence[str]) -> list[str] | None:
    """Return the vocabulary of a draft that another process loads, downloading no weights; None where a hub cannot be
    reached. Raises as `_read_vocabulary`."""
    if draft.identity is not None and not draft.source.startswith(HUB_PREFIX):
        return _read_vocabulary(draft, target=target)
    return vocabulary_at_hand(draft.source, Path(draft.base), target)


def translating(drafter: Drafter, target: LoadedSource, draft_tokenizer_dir: str) -> Drafter:
    """Put a drafter of another vocabulary behind a translation."""
    bridge = Bridge(load_tokenizer(target.tokenizer_dir), load_tokenizer(draft_tokenizer_dir))
    return TranslatingDrafter(drafter, bridge)


def prepare_tokenizer(draft: ModelDraftOptions) -> str:
    """Return the directory of a draft's tokenizer, where another process loads the model; "" for the simulated one."""
    model = draft.model
    if model.source.startswith(SIMULATED_PREFIX):
        return ""
    return prepare_own_tokenizer(model)


def _read_vocabulary(
    options: ModelOptions, progress: OnProgress = silent, target: Sequence[str] | None = None
) -> list[str]:
    """Return a model's vocabulary; `target`: what it is to be a draft of. Raises what `find_model` raises."""
    if options.identity is None:
        return vocabulary_from(options.source, Path(options.base), progress, target)
    return vocabulary_in(find_model(options, ModelStore(Path(options.store)), progress), target)


def _pair(draft: ModelDraftOptions, ours: list[str], theirs: list[str]) -> VocabularyPair:
    comparison = compare(ours, theirs)
    if comparison.match is Match.DIFFERS and not draft.translate:
        raise ModelRefused(f"{draft.place}: {refusal(draft.model.source, comparison)}")
    return VocabularyPair(comparison.match, vocabulary_fingerprint(theirs))
