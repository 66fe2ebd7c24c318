"""A model whose state cannot be rolled back: no drafts, no shared prefixes, and every interruption begins it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.contract import ModelRefused, silent
from orchestrator.protocol.commands import Submit
from orchestrator.worker.loading.models import load_model
from policies.sampling import Sampling
from tests.support.failing import FailingModel
from tests.support.hybrids import load_hybrid, prepare_hybrid, write_hybrid
from tests.support.loops import decode, loop_over, suffix
from tests.support.options import build_options
from tests.support.tiny_llama_files import TOKENS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_hybrid(tmp_path_factory.mktemp("hybrid"))


def requests(count: int, max_tokens: int = 24) -> list[Submit]:
    """Every other one sampled; the first two have one prompt, which repeats itself as drafters like it."""
    return [
        Submit(
            f"r{index}",
            [5 + max(1, index), 32, 101] * (4 + 5 * max(1, index)),
            max_tokens,
            sampling=Sampling(0.8 if index % 2 else 0.0, seed=index),
            stop_tokens=[],
        )
        for index in range(count)
    ]


def decode_alone(prepared: Path, submits: list[Submit]) -> dict[str, list[int]]:
    model = load_hybrid(prepared)
    loops = [loop_over(model, None, running=1) for _ in submits]
    found = {one.request_id: decode(loop, [one])[0][one.request_id] for one, loop in zip(submits, loops, strict=True)}
    model.close()
    return found


@pytest.fixture(scope="module")
def expected(prepared: Path) -> dict[str, list[int]]:
    found = decode_alone(prepared, requests(6))
    assert len({token for tokens in found.values() for token in tokens}) > len(TOKENS) // 10
    return found


def test_no_draft_is_verified_and_no_prefix_is_shared(prepared, expected):
    model = load_hybrid(prepared)
    loop = loop_over(model, suffix(), running=6)
    out, rounds = decode(loop, requests(6))
    assert out == expected
    assert sum(one.drafted for one in rounds) == 0
    gauges = loop.gauges(0)
    assert gauges.prefix_hits == 0
    out, _ = decode(loop, requests(6))  # what was said before is not begun with
    assert out == expected
    assert model.free_blocks() == model.capabilities.total_blocks
    model.close()


def test_whoever_gives_way_for_want_of_blocks_is_computed_again_from_the_beginning(prepared):
    submits = requests(4, max_tokens=1100)
    expected = decode_alone(prepared, submits)
    model = load_hybrid(prepared, kv_cache_bytes=840_000)
    caps = model.capabilities
    assert caps.slots == 3
    assert caps.total_blocks * caps.block_tokens < 3 * 1100
    loop = loop_over(model, suffix(), running=3)
    out, _ = decode(loop, submits)
    assert out == expected
    assert loop.gauges(0).preemptions > 0
    model.close()


@pytest.mark.parametrize("most_rows", [1, 3])
def test_a_forward_without_memory_leaves_states_that_nobody_trusts(prepared, expected, most_rows):
    """The first sequences of such a forward have been computed, and cannot be taken back."""
    inner = load_hybrid(prepared)
    model = FailingModel(inner)
    loop = loop_over(model, suffix(), running=6)
    out: dict[str, list[int]] = {one.request_id: [] for one in requests(6)}
    for one in requests(6):
        assert loop.submit(one) is None
    while not loop.idle:
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
        if min(map(len, out.values())) > 4:  # all of them decode
            model.most_rows = most_rows
    assert out == expected
    assert model.failed
    assert inner.free_blocks() == inner.capabilities.total_blocks
    inner.close()


def test_it_is_not_loaded_as_a_draft_wherever_its_file_came_from(tmp_path):
    name = write_hybrid(tmp_path).name
    with pytest.raises(ModelRefused, match=rf"{name}: it keeps a recurrent state.*cannot draft"):
        load_model(build_options(tmp_path, name, "llama_cpp"), 2, silent)
