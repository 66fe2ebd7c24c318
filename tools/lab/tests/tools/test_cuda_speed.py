"""How fast the torch adapter is on a CUDA device, at the shape of Llama 3.2 1B."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from outrider_lab.measure import cuda as bench_cuda

from adapters import registry
from adapters.contract import LoadOptions, Segment
from adapters.decoder.spec import DecoderSpec
from tests.adapters.test_torch_device import silent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
ADAPTER = registry.get("torch_device")
OPTIONS = LoadOptions(device="CUDA:0", slots=4, kv_cache_bytes=64 << 20)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[DecoderSpec, object]:
    directory = tmp_path_factory.mktemp("llama-1b")
    bench_cuda.prepare(bench_cuda.LLAMA_1B, directory)
    return bench_cuda.LLAMA_1B, directory


PROMPT = [(7 * i * i + 11) % 128_256 for i in range(512)]


def test_verifying_five_rows_takes_hardly_longer_than_one(llama):
    model = ADAPTER.load(llama[1], replace(OPTIONS, kv_cache_bytes=1 << 30, max_batch_rows=1024), silent)
    model.forward([Segment(0, 0, PROMPT, (511, 512))])
    steps = {width: bench_cuda.step_ms(model, 512, width) for width in (1, 5)}
    model.close()
    assert steps[5] <= 1.15 * steps[1]


def test_plain_decoding_is_faster_than_compiled_generate(llama):
    spec, directory = llama
    model = ADAPTER.load(directory, replace(OPTIONS, kv_cache_bytes=1 << 30, max_batch_rows=1024), silent)
    bench_cuda.plain_tokens_per_s(model, PROMPT, 8)
    ours = max(bench_cuda.plain_tokens_per_s(model, PROMPT, 128) for _ in range(3))
    model.close()
    gc.collect()
    other = bench_cuda.generate_tokens_per_s(bench_cuda.theirs(directory, spec, "cuda:0"), PROMPT, 128, "cuda:0")
    assert ours >= 1.3 * other
