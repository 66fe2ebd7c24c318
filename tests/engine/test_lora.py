"""Requests of several LoRA adapters in one decode loop say what each says alone without drafts, and share nothing."""

from __future__ import annotations

from itertools import count

import pytest

from adapters.contract import LoadOptions
from adapters.llama_cpp.adapter import LlamaCppAdapter
from adapters.llama_cpp.model import LlamaModel
from adapters.lora import open_lora
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.shared_memory import SharedMemories, SharedMemoryFailed
from orchestrator.worker.engine.kv_transfer.disk import LEAST_POSITIONS, KvDisk
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from policies.sampling import Sampling
from tests.support.loops import decode, loop_over, suffix
from tests.support.tiny_gguf import Tiny, write
from tests.support.tiny_lora import draw_pairs, write_lora
from tests.support.waiting import until

TINY = Tiny("llama", hidden=128, heads=2, kv_heads=1, head_dim=64, context=512)
SYSTEM = [(7 * i + 3) % TINY.vocabulary for i in range(LEAST_POSITIONS + 10)]
LORAS = ("", "a", "b")
NUMBERS = count()


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return what loads a model with two adapters, of so many KV blocks."""
    directory = tmp_path_factory.mktemp("lora")
    arrays = write(directory / "tiny.gguf", TINY)
    for seed, name in enumerate(LORAS[1:]):
        write_lora(directory / f"{name}.gguf", draw_pairs(arrays, seed))
    (directory / "prepared").mkdir()
    adapter = LlamaCppAdapter()
    adapter.prepare(directory / "tiny.gguf", directory / "prepared", lambda *_: None)
    source = directory / "tiny.gguf"
    loras = tuple(open_lora(name, f"{name}.gguf", directory, source, "llama_cpp", directory) for name in LORAS[1:])
    models: list[LlamaModel] = []

    def load_model(kv_cache_bytes: int = 8 << 20) -> LlamaModel:
        options = LoadOptions(slots=6, kv_cache_bytes=kv_cache_bytes, threads=1, loras=loras)
        model = adapter.load(directory / "prepared", options, lambda *_: None)
        assert isinstance(model, LlamaModel)
        models.append(model)
        return model

    yield load_model
    for model in models:
        model.close()


@pytest.fixture
def memories():
    made = SharedMemories()
    yield made
    made.close()


def request(lora: str, *ends: int, seed: int = 0, tokens: int = 40) -> Submit:
    sampling = Sampling(0.8, seed=seed) if seed else Sampling()
    return Submit(f"r{next(NUMBERS)}", [*SYSTEM, *ends], tokens, sampling, stop_tokens=[TINY.vocabulary - 1], lora=lora)


def test_requests_of_all_adapters_together_say_what_each_says_alone_without_drafts(load):
    seeds = [0, 2, 0, 4]
    submits = [request(lora, n % 3, seed=seed, tokens=100) for n, seed in enumerate(seeds) for lora in LORAS]
    alone = loop_over(load(), None, running=1, prefix_reuse=False)
    expected = {submit.request_id: decode(alone, [submit])[0][submit.request_id] for submit in submits}
    greedy = [tuple(expected[submit.request_id]) for submit in submits[:3]]
    assert len(set(greedy)) == 3
    blocks = 18 * 32 * 2 * 2 * TINY.layers * TINY.kv_heads * TINY.head_dim  # three sequences, of six that may run
    loop = loop_over(load(blocks), suffix(), running=6)
    out, rounds = decode(loop, submits)
    assert out == expected
    gauges = loop.gauges(0)
    assert gauges.preemptions > 0
    assert gauges.prefix_hits > 0
    assert sum(stats.accepted for done in rounds for delta in done.deltas if (stats := delta.stats)) > 0


def test_what_is_kept_on_disk_is_read_by_its_adapter_alone(load, tmp_path):
    def open_loop():
        model = load()
        return loop_over(model, suffix(), kept=KvDisk(KvMover(model, "tiny"), tmp_path, 64 << 20))

    first = open_loop()
    for end in range(3):
        decode(first, [request("a", end)])
    until(lambda: len(list(tmp_path.glob("*/*.kv"))) == 1, 20.0)
    plain = loop_over(load(), None, running=1, prefix_reuse=False)
    again = open_loop()
    for lora in ("", "b", "a"):
        submit = request(lora, 5)
        assert decode(again, [submit])[0] == decode(plain, [submit])[0]
        assert bool(again.gauges(0).prefix_loaded) == (lora == "a")


def test_pages_of_one_adapter_are_refused_by_a_sequence_of_another(load, memories):
    model = load()
    mover = KvMover(model, "tiny")
    loop = loop_over(model, None)
    decode(loop, [request("a")])
    memory = memories.create("pages", 64 << 20)
    model.use_lora(0, "a")
    held = model.attach(0, SYSTEM)
    pages = mover.write(0, SYSTEM[:held], memory, "a")
    assert len(mover.read(pages, SYSTEM, "a")) == pages.length_bytes
    for other in ("", "b"):
        with pytest.raises(SharedMemoryFailed, match="do not have the checksum"):
            mover.read(pages, SYSTEM, other)


def test_a_worker_without_the_adapter_refuses_the_request(load):
    refused = loop_over(load(), None).submit(request("c"))
    assert refused is not None
    assert refused.message == "this worker has no adapter 'c'"
