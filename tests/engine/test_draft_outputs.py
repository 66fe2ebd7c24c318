"""A draft with a part of the vocabulary proposes what it can say, by the target's ids, and never changes a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters import registry
from adapters.contract import LoadedModel, LoadOptions, ModelRefused
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.loading.models import load_target
from policies.sampling import Sampling
from tests.support import tiny_models
from tests.support.loops import decode, loop_over

KEPT = np.sort(np.random.default_rng(3).choice(tiny_models.VOCABULARY, 260, replace=False))
SAMPLINGS = [
    Sampling(),
    Sampling(0.8, seed=5),
    Sampling(0.7, top_p=0.9, top_k=40, seed=6),
    Sampling(0.0, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((int(KEPT[7]), 2.0), (9, 1.0))),
    Sampling(0.9, presence_penalty=0.5, seed=8),
]


def load(directory: Path, shared_store: Path) -> LoadedModel:
    adapter = registry.get("openvino_rt")
    prepared = ModelStore(shared_store).prepare(resolve(str(directory), Path()), adapter, lambda *_: None)
    return adapter.load(prepared, LoadOptions(kv_cache_bytes=16 << 20, slots=8, max_batch_rows=64), lambda *_: None)


def test_it_drafts_by_the_targets_ids_and_changes_nothing(tmp_path: Path, shared_store: Path) -> None:
    source = tiny_models.write_model(tmp_path / "target", "llama")
    target = load(source, shared_store)
    # The target's own weights: wherever its choice can be said, the draft is right but for rounding.
    draft = load(tiny_models.write_reduced(tmp_path / "draft", source, KEPT, "any"), shared_store)
    submits = [
        Submit(str(number), [7, 30 + number, 255, 9], 40, sampling, depth=4)
        for number, sampling in enumerate(SAMPLINGS)
    ]
    expected, _ = decode(loop_over(target, None), submits)
    drafter = ModelDrafter(
        draft, DrafterState("m", "model"), SystemClock(), vocabulary=tiny_models.VOCABULARY, prefill_ms=100.0
    )
    found, rounds = decode(loop_over(target, drafter), submits)
    assert found == expected
    drafted, accepted = (sum(getattr(one, name) for one in rounds) for name in ("drafted", "accepted"))
    sayable = np.mean([token in set(KEPT.tolist()) for tokens in expected.values() for token in tokens])
    assert sayable < 0.97, "the test is to meet tokens that the draft cannot say"
    assert accepted / drafted > 0.4
    for model in (draft, target):  # in this order, or OpenVINO leaves a signal stack behind that is gone
        model.close()


def test_it_is_refused_as_a_target(tmp_path: Path, shared_store: Path) -> None:
    source = tiny_models.write_model(tmp_path / "whole", "llama")
    tiny_models.write_reduced(tmp_path / "draft", source, KEPT, "any")
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model: {{source: draft}}\nstore: {{directory: '{shared_store}'}}\n")
    words = r"it is a draft \(draft_vocab_size\), which can say 260 of 320 tokens only"
    with pytest.raises(ConfigError, match=words):
        load_config(config)
    with pytest.raises(ModelRefused, match=words):
        load_target(engine_options(load_config(config, sources=False), tmp_path), lambda *_: None)
