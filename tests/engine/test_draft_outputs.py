"""A draft with a part of the vocabulary proposes what it can say, by the target's ids, and never changes a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters import registry
from adapters.contract import LoadedModel, LoadOptions, ModelRefused
from adapters.decoder import draft_outputs
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from device_profiles.profile import DRAFT
from orchestrator.clock import SystemClock
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.load_options import ModelDraftOptions
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.loading.drafters import build_drafter
from orchestrator.worker.loading.models import load_model, load_target
from orchestrator.worker.measuring.quality import measure_quality
from policies.sampling import Sampling
from tests.support import tiny_models
from tests.support.conformance import NO_FORK
from tests.support.loops import decode, loop_over
from tests.support.tiny_gguf import Tiny, write

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


@NO_FORK
def test_a_draft_of_a_file_takes_a_copy_of_few_outputs_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_outputs, "MOST_OUTPUTS", 40)
    shape = Tiny("qwen2", hidden=128, heads=2, kv_heads=1, head_dim=64, bias=True)
    for name in ("target", "draft"):
        write(tmp_path / f"{name}.gguf", shape)
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"store: {{directory: '{tmp_path}/store'}}\n"
        "model: {source: target.gguf, adapter: llama_cpp}\nlimits: {max_running: 8}\n"
        "drafts: [{method: model, source: draft.gguf, adapter: llama_cpp}]\n"
    )
    options = engine_options(load_config(config), tmp_path)
    target = load_target(options, lambda *_: None)
    submits = [
        Submit(str(number), [7, 30 + number, 55, 9], 40, sampling, depth=4)
        for number, sampling in enumerate((Sampling(), Sampling(0.8, seed=5), Sampling(0.7, top_p=0.9, seed=6)))
    ]
    expected, _ = decode(loop_over(target.model, None), submits)
    drafter = build_drafter(options, target)
    assert drafter is not None
    outputs, rounds = decode(loop_over(target.model, drafter), submits)
    state = drafter.states()[-1]
    drafter.close()
    target.model.close()
    assert outputs == expected
    assert max(token for tokens in expected.values() for token in tokens) >= 40
    assert sum(done.accepted for done in rounds) > 20
    assert state.weights == "int4 (Q4_0 from F32), 40 of 64 tokens"
    assert state.precision_reason.startswith("weights draft: no output depends on a draft's values")


@NO_FORK
def test_what_was_measured_of_both_formats_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_outputs, "MOST_OUTPUTS", 40)
    write(tmp_path / "draft.gguf", Tiny("qwen2", hidden=128, heads=2, kv_heads=1, head_dim=64, bias=True))
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"store: {{directory: '{tmp_path}/store'}}\n"
        "model: {source: draft.gguf, adapter: llama_cpp, exactness: kernel}\n"
        "drafts: [{method: model, source: draft.gguf, adapter: llama_cpp}]\n"
    )
    options = engine_options(load_config(config), tmp_path)
    prompts = [[5, 9, 37, 12], [20, 14, 14, 60]]
    whole, small = (
        measure_quality(options.with_model(weights=weights), prompts, lambda *_: None) for weights in ("as_file", DRAFT)
    )
    assert whole["perplexity"] > 1.0 > small["perplexity"] == 0.0  # it does not say all tokens
    assert 0.1 < small["greedy_agreement"] < whole["greedy_agreement"]
    draft = options.drafters[0]
    assert isinstance(draft, ModelDraftOptions)
    loaded = load_model(draft.model, 2, lambda *_: None)
    loaded.model.close()
    rates = [figures["greedy_agreement"] / figures["step_ms"] for figures in (whole, small)]
    assert loaded.choice is not None
    assert (loaded.choice.weights == DRAFT) == (rates[1] >= rates[0])
    assert ("measured to draft more" in loaded.choice.reason) == (rates[1] >= rates[0])


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
