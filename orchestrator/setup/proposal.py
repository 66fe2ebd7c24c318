"""What could be served here: each model with its memory and speed as a plan predicts them, a target, and its draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from adapters.contract import AdapterError
from adapters.device_memory import read_host_memory
from adapters.local_models import LocalModel
from device_profiles.device_names import is_processor
from device_profiles.units import GIB, MIB, human_bytes
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.load import load_text
from orchestrator.config.model import Limits
from orchestrator.config.target import AUTO
from orchestrator.daemon.bootstrap.planning import build_local_request, propose_local
from orchestrator.errors import OutriderError
from orchestrator.planning.applied import name_shard_device
from orchestrator.planning.estimates import PROCESS_BYTES
from orchestrator.planning.model_check import DraftSource, ModelCheck, check_for_serving
from orchestrator.planning.profiling.work import profile_store

READING_TOKENS_PER_S: Final = 5.0
"""What people read: some 250 words a minute. A larger model that is slower is proposed only where none is faster."""
_KV_CACHES: Final = (GIB, GIB // 2, GIB // 4)
"""What is tried for `limits.kv_cache`, the default first. Not tuned."""
DRAFT_SHARE: Final = 0.5
"""Of the target's weights a draft has at most: a token of it costs half of a target's then. ADR 0142. Not tuned."""
_DRAFT_KV_BYTES: Final = int(ModelDraft.model_fields["kv_cache"].default)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that could be served. `problem`: why it cannot, "" where it can; then `sections` are the lines of its
    cluster.yaml, and it is predicted to run on that runtime's `device`, in `memory_bytes`, at `tokens_per_s` for one
    stream, give or take the share `error`. `measured`: by a profile, not by an estimate. `ttft_ms`: to the first token
    of a prompt as `placement` plans for."""

    model: LocalModel
    check: ModelCheck | None = None
    problem: str = ""
    sections: dict[str, Any] | None = None
    runtime: str = ""
    device: str = ""
    memory_bytes: int = 0
    kv_cache_bytes: int = 0
    tokens_per_s: float = 0.0
    error: float = 0.0
    ttft_ms: float = 0.0
    measured: bool = False

    @property
    def parameters(self) -> int:
        return (self.check.parameters or 0) if self.check is not None else 0

    @property
    def weights_bytes(self) -> int:
        return self.model.size_bytes


def examine_model(model: LocalModel, path: Path) -> Candidate:
    """Return what a model would be as the target of a cluster.yaml at `path`. Its files' heads are read."""
    try:
        check = check_for_serving(model.source, path.parent, int(Limits().kv_cache))
    except AdapterError as error:
        return Candidate(model, problem=str(error))
    if not check.cluster_yaml:
        refusals = dict.fromkeys(verdict.refusal or verdict.missing for verdict in check.runtimes)
        return Candidate(model, check, problem=next((why for why in refusals if why), "no runtime here loads it"))
    problem = ""
    for kv_cache_bytes in _KV_CACHES:
        try:
            return _predict(model, check, kv_cache_bytes, path)
        except (OutriderError, AdapterError) as error:
            problem = problem or str(error)
    return Candidate(model, check, problem=problem)


def _build_sections(check: ModelCheck, kv_cache_bytes: int) -> dict[str, Any]:
    """Return the sections of a cluster.yaml that serves a model, with its KV cache where that is not the default."""
    sections: dict[str, Any] = yaml.safe_load(check.cluster_yaml)
    if kv_cache_bytes != int(Limits().kv_cache):
        sections["limits"] = {"kv_cache": f"{kv_cache_bytes // MIB} MiB"}
    return sections


def _predict(model: LocalModel, check: ModelCheck, kv_cache_bytes: int, path: Path) -> Candidate:
    """Return a model with what a plan predicts of it. Raises what planning raises."""
    sections = _build_sections(check, kv_cache_bytes)
    planned = {**sections, "model": {**sections["model"], "device": AUTO}}  # so that there is a plan
    config = load_text(yaml.safe_dump(planned, sort_keys=False), path)
    known = bool(profile_store(config).models())  # digests take a second for each GB
    request = build_local_request(config, path.parent, digests=known)
    whole = replace(request, target=replace(request.target, splits=()))  # what is written names one device
    proposal = propose_local(config, path.parent, whole)
    replica = proposal.plan.replicas[0]
    shard = replica.shards[0]
    return Candidate(
        model,
        check,
        sections=sections,
        kv_cache_bytes=kv_cache_bytes,
        runtime=shard.runtime,
        device=name_shard_device(proposal, shard),
        memory_bytes=sum(int(shard.memory.total) for shard in replica.shards),
        tokens_per_s=replica.prediction.stream_tokens_per_s,
        error=replica.prediction.error,
        ttft_ms=replica.prediction.ttft_ms,
        measured=shard.source not in ("estimate", "datasheet"),
    )


def choose_target(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the model with the most parameters of those that are fast enough to be read along; where none is, the
    fastest. None where none can be served."""
    usable = [candidate for candidate in candidates if not candidate.problem]
    if fast := [candidate for candidate in usable if candidate.tokens_per_s >= READING_TOKENS_PER_S]:
        return max(fast, key=lambda candidate: (candidate.parameters, candidate.tokens_per_s))
    return max(usable, key=lambda candidate: candidate.tokens_per_s, default=None)


def list_drafts(target: Candidate, candidates: Sequence[Candidate], path: Path) -> list[Candidate]:
    """Return the models that may draft for a target, the cheapest first: at most half as large, of its vocabulary, and
    with room beside it."""
    smaller = [
        candidate
        for candidate in candidates
        if not candidate.problem and candidate.weights_bytes <= DRAFT_SHARE * target.weights_bytes
    ]
    fitting = sorted(filter(lambda draft: _has_room(target, draft), smaller), key=lambda draft: draft.weights_bytes)
    if not fitting:
        return []
    sources = [DraftSource(draft.model.source, path.parent) for draft in fitting]
    verdicts = check_for_serving(target.model.source, path.parent, target.kv_cache_bytes, sources).drafts
    return [draft for draft, verdict in zip(fitting, verdicts, strict=True) if not verdict.refusal]


def _has_room(target: Candidate, draft: Candidate) -> bool:
    """Return whether the host's memory has a draft beside its target; a target on a device of its own leaves it."""
    free_bytes = read_host_memory().free_bytes
    beside = target.memory_bytes if is_processor(target.device) else 0
    return free_bytes - beside >= draft.weights_bytes + _DRAFT_KV_BYTES + PROCESS_BYTES


def describe_speed(candidate: Candidate) -> str:
    """Return the predicted speed of one stream in words."""
    if candidate.measured:
        how = "measured here"
    else:
        how = f"an estimate, give or take {candidate.error:.0%}" if candidate.error else "an estimate"
    return f"{candidate.tokens_per_s:.1f} tokens/s ({how})"


def describe_memory(candidate: Candidate) -> Iterator[str]:
    """Yield what a model takes, and what text its KV cache holds."""
    yield f"{human_bytes(candidate.memory_bytes)} on {candidate.runtime} {candidate.device}"
    check = candidate.check
    if check is not None and check.kv_bytes_per_token and check.context_tokens:
        held = min(check.context_tokens, candidate.kv_cache_bytes // check.kv_bytes_per_token)
        cache = f"a KV cache of {human_bytes(candidate.kv_cache_bytes)}"
        yield f"{cache} holds {held:,} of its {check.context_tokens:,} tokens"
