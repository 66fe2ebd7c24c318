"""Losslessness on the real model and runtimes: speculation, depth, batching and preemption never change a token.

The default runtime has the whole model, the other ones its first layers: their kernels and shapes are the same, and
logits lie closer together there, so that a bit that differs changes a token sooner. `make slow` gives all of them the
whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from adapters.contract import LoadedModel, Precision
from adapters.model_source import ModelSource, resolve
from adapters.names import OPENVINO_LLAMA
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.packed_tokens import pack_tokens
from orchestrator.protocol.shared_memory import SharedMemories
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.prediction import PredictionDrafter
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from tests.engine.conftest import load
from tests.support.branches import TurningDrafter, branching_loop, count_branches
from tests.support.conformance import NO_FORK
from tests.support.drafters import texts_of
from tests.support.kv_moves import MovingLoop
from tests.support.loops import decode, loop_over, suffix
from tests.support.tiny_ir import write_genai_ir

pytestmark = pytest.mark.model
SAMPLED = Sampling(0.8, top_p=0.95, seed=7)
TOKENS = 24


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("openvino_rt", "whole"), id="openvino_rt"),
        pytest.param(("openvino_rt", "first layers as IR"), id="openvino_rt-ir-layers"),
        pytest.param(("openvino_rt", "first layers, KV cache in 8 bits"), id="openvino_rt-8bit-layers"),
        pytest.param(("onnx_rt", "first layers"), id="onnx_rt-layers"),
        pytest.param(("torch_device", "first layers"), id="torch_device-layers"),
        pytest.param(("llama_cpp", "first layers"), id="llama_cpp-layers"),
        pytest.param(("openvino_llama", "first layers"), id="openvino_llama-layers", marks=NO_FORK),
        pytest.param(("openvino_rt", "whole as IR"), id="openvino_rt-ir", marks=pytest.mark.slow),
        pytest.param(("openvino_rt", "whole, KV cache in 8 bits"), id="openvino_rt-8bit", marks=pytest.mark.slow),
        pytest.param(("llama_cpp", "whole"), id="llama_cpp", marks=pytest.mark.slow),
        pytest.param(("onnx_rt", "whole"), id="onnx_rt", marks=pytest.mark.slow),
        pytest.param(("torch_device", "whole"), id="torch_device", marks=pytest.mark.slow),
    ],
)
def target(request) -> tuple[str, str]:
    """A runtime, and how much of the default model it has."""
    return request.param


@pytest.fixture(scope="module")
def runtime(target) -> str:
    return target[0]


@pytest.fixture(scope="module")
def source(target, file, layers_file, tmp_path_factory) -> ModelSource:
    part, _, form = target[1].partition(" as ")
    gguf = file if part.startswith("whole") else layers_file
    if not form:
        return gguf
    return resolve(str(write_genai_ir(gguf.path, tmp_path_factory.mktemp("ir") / "genai")), Path())


@pytest.fixture(scope="module")
def kv_cache(target) -> Precision | None:
    return Precision.INT8 if target[1].endswith("8 bits") else None


@pytest.fixture(scope="module")
def model(store, source, runtime, kv_cache) -> Iterator[LoadedModel]:
    loaded = load(runtime, store, source, kv_cache=kv_cache)
    assert kv_cache in (None, loaded.capabilities.kv_cache)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def prompts(prompts, target) -> list[list[int]]:
    """Eight prompts, and fewer where the whole model takes longer."""
    few = {
        ("openvino_rt", "whole"): 4,
        ("openvino_rt", "whole as IR"): 4,
        ("openvino_rt", "whole, KV cache in 8 bits"): 4,
        ("openvino_rt", "first layers as IR"): 3,
        ("onnx_rt", "whole"): 4,
        ("llama_cpp", "whole"): 4,
        ("torch_device", "whole"): 2,
    }
    return sorted(prompts, key=len)[: few.get(target, 8)]


def submits(prompts: list[list[int]], sampling: Sampling, depth: int | None = None) -> list[Submit]:
    return [
        Submit(str(index), prompt, TOKENS, sampling, stop_tokens=[0, 2], depth=depth)
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=[Sampling(), SAMPLED], ids=["greedy", "sampled"])
def case(request, model, prompts) -> tuple[Sampling, dict[str, list[int]]]:
    """A sampling, and what target-only decoding makes of each prompt alone."""
    sampling = request.param
    out, rounds = decode(loop_over(model, None, running=1, prefix_reuse=False), submits(prompts, sampling))
    assert sum(done.drafted for done in rounds) == 0
    return sampling, out


@pytest.mark.parametrize(("running", "depth"), [(1, None), (8, 1), (8, 8), (8, None)])
def test_speculation_never_changes_a_token(model, prompts, case, running, depth):
    sampling, expected = case
    out, rounds = decode(loop_over(model, suffix(), running=running), submits(prompts, sampling, depth))
    assert out == expected
    if depth is not None:  # else the policy decides, and drafts of so few sampled tokens may not be worth it
        assert sum(done.accepted for done in rounds) > 0


def test_branches_never_change_a_token(model, prompts, case):
    """With costs of a device on which rows are nearly free, and forks of the runtime's own."""
    sampling, expected = case
    sent = submits(prompts[:3], sampling)
    drafter = TurningDrafter(texts_of(sent, expected), wrong_every=2)
    out, rounds = decode(branching_loop(model, drafter, running=2), sent)
    assert out == {submit.request_id: expected[submit.request_id] for submit in sent}
    verified, taken = count_branches(rounds)
    assert 0 < taken < verified


@pytest.mark.parametrize("edited", [False, True])
def test_predictions_never_change_a_token(model, prompts, case, edited):
    sampling, expected = case
    asked = []
    for one in submits(prompts, sampling):
        text = expected[one.request_id]
        text = [*text[:9], 50, 51, *text[10:]] if edited else text
        asked.append(msgspec.structs.replace(one, prediction=pack_tokens(text)))
    chain = ChainDrafter([suffix()], PredictionDrafter(SystemClock()))
    out, rounds = decode(loop_over(model, chain, running=8, depth=64), asked)
    assert out == expected
    assert sum(done.by_drafter.get("prediction", (0, 0))[1] for done in rounds) > 0


def test_plain_decoding_in_a_batch_never_changes_a_token(model, prompts, case):
    sampling, expected = case
    out, _ = decode(loop_over(model, None, running=8), submits(prompts, sampling))
    assert out == expected


def test_losing_the_cache_half_way_never_changes_a_token(model, prompts, case):
    sampling, expected = case
    moved = [
        Submit(s.request_id, s.prompt, s.max_tokens, s.sampling, expected[s.request_id][:13], s.stop_tokens)
        for s in submits(prompts, sampling)
        if len(expected[s.request_id]) > 13
    ]
    out, _ = decode(loop_over(model, suffix()), moved)
    assert all(expected[key][:13] + tokens == expected[key] for key, tokens in out.items())


def test_preemption_and_remembered_prefixes_never_change_a_token(
    store, source, runtime, kv_cache, model, prompts, case
):
    """Once with room for the longest request alone, and again when all prompts are remembered."""
    sampling, expected = case
    prompts = prompts[:4]
    expected = {str(index): expected[str(index)] for index in range(len(prompts))}
    longest = max(map(len, prompts)) + TOKENS + 3 * model.capabilities.block_tokens
    if runtime == OPENVINO_LLAMA:  # half of it is for prompts alone
        longest = 2 * longest + 2 * model.capabilities.block_tokens
    tight = load(runtime, store, source, kv_cache_bytes=longest * model.spec.bytes_per_token, kv_cache=kv_cache)
    loop = loop_over(tight, suffix(), running=8)
    for _ in range(2):
        out, _ = decode(loop, submits(prompts, sampling))
        assert out == expected
    tight.close()
    again = loop_over(model, suffix())
    for _ in range(2):
        assert decode(again, submits(prompts, sampling))[0] == expected
    gauges = again.gauges(0)
    assert gauges.prefix_hits > 0


def test_seeds_differ_and_each_is_reproducible(model, prompts):
    def sample(seed: int) -> list[int]:
        chosen = Sampling(1.0, seed=seed)
        return decode(loop_over(model, suffix()), submits(prompts[-1:], chosen))[0]["0"]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_moved_kv_caches_never_change_a_token(model, prompts, case):
    """All streams go from one loop to another, which has their pages only: it remembers no prompt. The sampled ones go
    while their prompts are computed."""
    sampling, expected = case
    rounds = 1 if sampling.temperature else 9
    leaving, coming = (MovingLoop(loop_over(model, suffix(), prefix_reuse=False), "default model") for _ in range(2))
    first, second = leaving.loop, coming.loop
    asked = {one.request_id: one for one in submits(prompts, sampling)}
    got: dict[str, list[int]] = {key: [] for key in asked}
    for one in asked.values():
        assert first.submit(one) is None
    done: set[str] = set()
    for _ in range(rounds):
        done |= collect(first, got)
    memories = SharedMemories()
    moved = {key: leaving.move_out(key, memories.create(key, 1 << 30)).pages for key in asked if key not in done}
    assert first.idle
    for key, pages in moved.items():
        assert pages is not None or not got[key]
        taken = None
        if pages is not None:
            taken = coming.take(pages.positions, coming.mover.read(pages, [*asked[key].prompt, *got[key]]))
        assert second.submit(msgspec.structs.replace(asked[key], committed=list(got[key])), None, taken) is None
    memories.close()
    while not second.idle:
        collect(second, got)
    assert got == expected
    assert [moved_in.why for moved_in in coming.came] == [""] * len(coming.came)
    assert len(coming.came) == sum(pages is not None for pages in moved.values()) > 0


def collect(loop: DecodeLoop, got: dict[str, list[int]]) -> set[str]:
    """Run a round; returns who has finished."""
    deltas = loop.run_round().deltas
    for delta in deltas:
        got[delta.request_id].extend(delta.tokens)
    return {delta.request_id for delta in deltas if delta.finish}
