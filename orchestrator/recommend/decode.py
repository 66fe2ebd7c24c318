"""What decoding in one process needs before it begins, and tells beside its figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from adapters.tokenizer import load_tokenizer
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.recommend.record import ModeRun, Prompt, measure_decoding
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.measuring.prompts import OWN_PROMPTS, PromptText, read_texts, spread

_WARM_DEPTH = 4


def read_prompts(path: Path, target: LoadedSource, limit: int) -> list[Prompt]:
    """Read prompts and encode them as the chat API does. Raises MeasurementError naming file and line."""
    texts = read_texts(path)
    return encode_prompts(spread(texts, min(limit, len(texts)) or len(texts)), target)


def encode_prompts(texts: Sequence[PromptText], target: LoadedSource) -> list[Prompt]:
    tokenizer = load_tokenizer(target.tokenizer_dir)
    stop_tokens = sorted(tokenizer.eos_ids)
    return [
        Prompt(text.key, text.category, tokenizer.encode_chat([{"role": "user", "content": text.text}]), stop_tokens)
        for text in texts
    ]


def warm_up(target: LoadedSource, options: EngineOptions, drafter: Drafter | None) -> None:
    """Let runtimes compile their shapes, on prompts of our own: what a drafter learns of them helps with no other.

    Drafts have a fixed depth, so whether they pay is not tried here, unmeasured."""
    warm = [
        Submit(f"warm-{prompt.key}", prompt.tokens, 24, stop_tokens=prompt.stop_tokens)
        for prompt in encode_prompts(OWN_PROMPTS[:2], target)
    ]
    measure_decoding(build_loop(target, options, None), warm, ModeRun("plain"))
    fixed = [msgspec.structs.replace(submit, depth=min(_WARM_DEPTH, options.max_depth)) for submit in warm]
    measure_decoding(build_loop(target, options, drafter), fixed, ModeRun("spec"))


def environment_of(target: LoadedSource, options: EngineOptions) -> dict[str, Any]:
    """Return what a result was measured with: versions, machine and loaded target."""
    caps = target.model.capabilities
    return {
        "outrider": version("outrider"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "model": target.name,
        "adapter": options.model.adapter,
        "device": caps.device,
        "weights": caps.weights,
        "activations": caps.activations.value,
        "kv_cache": caps.kv_cache.value,
        "exactness": caps.exactness.value,
        "row_invariant": target.row_invariant,
    }
