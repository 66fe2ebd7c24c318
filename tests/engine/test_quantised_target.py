"""A target whose weights torchao quantised says, with drafts of another runtime, what it says alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from adapters import registry
from adapters.conformance.case import exact_class
from adapters.contract import LoadedModel, LoadOptions, Precision, silent
from adapters.hf_directory import model_files
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.variant import Variant
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.model import ModelDrafter
from policies.sampling import Sampling
from tests.support import tiny_models
from tests.support.loops import decode, loop_over, suffix

TOKENS = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, shared_store) -> Iterator[tuple[LoadedModel, LoadedModel]]:
    """A target on torch with weights of 8 bits, and a draft on ONNX Runtime with the same weights as they are."""
    root = tmp_path_factory.mktemp("quantised")
    source = tiny_models.write_model(root / "tiny", "llama3", kind="BF16")
    file = ModelSource(path=source, name="tiny", source=str(source), files=model_files(source))
    store, options = ModelStore(shared_store), LoadOptions(slots=4, max_batch_rows=64, kv_cache_bytes=64 << 20)
    models = []
    for runtime, weights in (("torch_device", Precision.INT8), ("onnx_rt", None)):
        adapter = registry.get(runtime)
        path = store.prepare(file, Variant(adapter, weights), silent)
        exact = exact_class(adapter, path, options)
        models.append(adapter.load(path, replace(options, numerical_class=exact), silent))
    yield models[0], models[1]
    for model in models:
        model.close()


def requests(depth: int | None = None) -> list[Submit]:
    """Two prompts; each greedily, and drawn with a seed. At a fixed `depth` drafts are used whatever they cost."""
    prompts = [[5, 60, 61, 62, 63] * 4, [7, 80, 90, 100] * 3 + [7, 80]]
    samplings = {"greedy": Sampling(), "drawn": Sampling(0.7, top_p=0.95, seed=11)}
    return [
        Submit(f"{name}-{index}", prompt, TOKENS, sampling, stop_tokens=[2], depth=depth)
        for index, prompt in enumerate(prompts)
        for name, sampling in samplings.items()
    ]


@pytest.fixture(scope="module")
def expected(loaded) -> dict[str, list[int]]:
    """What the target alone says to each request alone."""
    return decode(loop_over(loaded[0], None, running=1, prefix_reuse=False), requests())[0]


@pytest.mark.parametrize("drafts", ["suffix", "model"])
def test_drafts_change_nothing_of_what_a_quantised_target_says(loaded, expected, drafts):
    target, draft = loaded
    assert target.capabilities.weights.startswith("int8")
    assert not draft.capabilities.weights.startswith("int8")
    if drafts == "model":
        loop = loop_over(target, _model_drafter(target, draft))
        assert decode(loop, requests(depth=4))[0] == expected
    else:
        loop = loop_over(target, suffix())
        assert decode(loop, requests())[0] == expected
        assert decode(loop, requests())[0] == expected  # a random model repeats nothing, but it is asked again
    state = loop.gauges(0).drafters[-1]
    assert 0 < state.accepted < state.drafted, f"{state.accepted} of {state.drafted}: some right and some wrong"


def _model_drafter(target: LoadedModel, draft: LoadedModel) -> ModelDrafter:
    state = DrafterState("model", "model", adapter="onnx_rt")
    return ModelDrafter(draft, state, SystemClock(), vocabulary=target.spec.vocabulary_size, prefill_ms=500.0)
