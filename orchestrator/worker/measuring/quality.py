"""Measures what number formats cost: perplexity and greedy choices beside the exact values in float32, and a step.

The reference answers every prompt greedily. The model under test reads prompts and answers (teacher-forced).
Perplexity is exp(-mean log-probability of the next token) over all positions; greedy agreement is the share of the
answers' positions at which it chooses what the reference chose. A draft's copy that cannot say all tokens has no
perplexity: 0 stands for it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from adapters import registry
from adapters.artefact import read_manifest
from adapters.contract import Exactness, LoadedModel, ModelRefused, Precision, Segment
from adapters.decoder.reference import Reference, TextCache
from adapters.decoder.source import open_source
from adapters.device_memory import read_host_memory
from adapters.model_source import ModelSource, resolve
from adapters.model_store import ModelStore
from adapters.quality import add_quality, log_probabilities
from device_profiles.profile import DRAFT
from device_profiles.units import human_bytes
from device_profiles.whole_file import replace_file
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.worker.loading.models import load_target
from orchestrator.worker.loading.prepared import OnProgress
from orchestrator.worker.measuring.steps import follow_on

Rows = NDArray[np.float32]
# ADR 0020: 17 prompts give 1,088 tokens so, an error of 0.5 % at 97 % agreement.
ANSWER_TOKENS = 64
# ADR 0020. Not tuned.
_TIMED_STEPS = 40


@dataclass(frozen=True, slots=True)
class ReferenceTexts:
    """Texts and what the reference said of them: where each answer begins, and log-probabilities of next tokens."""

    tokens: list[list[int]]
    begins: list[int]
    log_probabilities: list[float]


def measure_quality(options: EngineOptions, prompts: Sequence[list[int]], progress: OnProgress) -> dict[str, Any]:
    """Measure the model that the options name, write the figures beside its weights, and return them.

    Raises what adapters raise, ModelRefused where the reference does not fit into memory.
    """
    if options.model.weights == DRAFT:  # which no target runs in
        options = options.with_model(exactness=Exactness.KERNEL.value)
    store = ModelStore(Path(options.model.store))
    file = store.whole(resolve(options.model.source, Path(options.model.base), progress), progress)
    target = load_target(options, progress)
    try:
        texts = reference_texts(store.root / target.prepared.parent.name, file, prompts, progress)
        figures = _compare_answers(target.model, texts, progress)
        figures["step_ms"], figures["step_rows"] = _step_ms(target.model, texts.tokens[0])
        caps = target.model.capabilities
        figures |= {
            "model": target.name,
            "adapter": options.model.adapter,
            "weights": caps.weights,
            "device": caps.device,
            "activations": caps.activations.value,
            "kv_cache": caps.kv_cache.value,
            "exactness": caps.exactness.value,
            "reference": "the file's exact values, float32, numpy",
            "outrider": version("outrider"),
            "recipe": (read_manifest(target.prepared) or {}).get("recipe", ""),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        add_quality(target.prepared, figures)
    finally:
        target.model.close()
    return figures


def reference_texts(
    directory: Path, file: ModelSource, prompts: Sequence[list[int]], progress: OnProgress
) -> ReferenceTexts:
    """Return the reference's answers to the prompts; they are computed once and kept in `directory`."""
    key = hashlib.blake2b(json.dumps([1, ANSWER_TOKENS, list(prompts)]).encode(), digest_size=6).hexdigest()
    kept = directory / f"reference-{key}.json"
    if kept.is_file():
        return ReferenceTexts(**json.loads(kept.read_text(encoding="utf-8")))
    weights = open_source(file.path, Precision.FP32)
    needed, free = 4 * weights.spec.matrix_elements, read_host_memory().free_bytes
    if needed > free:
        raise ModelRefused(
            f"{file.name}: the reference in float32 needs {human_bytes(needed)}, and {human_bytes(free)} are free"
        )
    with threadpool_limits(limits=1, user_api="blas"):  # on busy cores several threads took six times as long
        texts = _answer_prompts(Reference(weights), prompts, progress)
    with replace_file(kept) as kept_file:
        kept_file.write(json.dumps(asdict(texts)).encode())
    return texts


def _answer_prompts(reference: Reference, prompts: Sequence[list[int]], progress: OnProgress) -> ReferenceTexts:
    texts = [TextCache() for _ in prompts]
    tokens = [list(prompt) for prompt in prompts]
    new: list[list[int]] = [list(prompt) for prompt in prompts]
    scores: list[list[float]] = [[] for _ in prompts]
    for step in range(ANSWER_TOKENS):
        progress("the reference answers", step / ANSWER_TOKENS)
        rows = reference.extend(texts, new)
        chosen = [int(part[-1].argmax()) for part in rows]
        for index, part in enumerate(rows):
            tokens[index].append(chosen[index])
            scores[index] += log_probabilities(part, [*new[index][1:], chosen[index]])
        new = [[token] for token in chosen]
    return ReferenceTexts(tokens, [len(prompt) - 1 for prompt in prompts], [score for text in scores for score in text])


def _compare_answers(model: LoadedModel, texts: ReferenceTexts, progress: OnProgress) -> dict[str, Any]:
    same, scores = [], []
    ids = np.array(model.spec.output_ids or range(model.spec.vocabulary_size))
    for number, (tokens, begin) in enumerate(zip(texts.tokens, texts.begins, strict=True)):
        progress("read the answers", number / len(texts.tokens))
        rows = feed_tokens(model, tokens[:-1])
        if not model.spec.output_ids:
            scores += log_probabilities(rows, tokens[1:])
        same += list(ids[rows[begin:, : len(ids)].argmax(axis=1)] == np.asarray(tokens[begin + 1 :]))
        model.release(0)
    exact = float(np.exp(-np.mean(texts.log_probabilities)))
    perplexity = float(np.exp(-np.mean(scores))) if scores else 0.0
    return {
        "positions": len(texts.log_probabilities),
        "answer_positions": len(same),
        "perplexity": perplexity,
        "reference_perplexity": exact,
        "perplexity_ratio": perplexity / exact,
        "greedy_agreement": float(np.mean(same)),
    }


def feed_tokens(model: LoadedModel, tokens: list[int]) -> Rows:
    """Return all rows of a text, fed to slot 0 in chunks."""
    chunk, rows = model.capabilities.max_batch_rows, []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        rows.append(model.forward([Segment(0, start, part, (0, len(part)))]).logits.copy())
    return np.concatenate(rows)


def _step_ms(model: LoadedModel, tokens: list[int]) -> tuple[float, int]:
    rows = model.capabilities.min_rows
    feed_tokens(model, tokens)
    times = []
    for _ in range(_TIMED_STEPS):
        started = time.perf_counter()
        model.forward(follow_on(model, [Segment(0, len(tokens), tokens[:rows], (0, rows))]))
        times.append((time.perf_counter() - started) * 1000.0)
    model.release(0)
    return statistics.median(times), rows


def list_stored_quality(store: Path) -> list[dict[str, Any]]:
    """Return what lies in a model store: one entry for each prepared model of a known runtime."""
    from adapters.quality import read_quality

    models = []
    for path, manifest in ModelStore(store).all():
        if manifest["recipe_name"] in registry.names():
            size = sum(facts["bytes"] for facts in manifest["files"].values())
            kept = {key: manifest.get(key, "") for key in ("source", "recipe_name", "recipe", "created")}
            facts = path / "spec.json"
            weights = json.loads(facts.read_text(encoding="utf-8")).get("weights", "") if facts.is_file() else ""
            models.append({**kept, "weights": weights, "path": str(path), "bytes": size, "quality": read_quality(path)})
    return models
