"""What is true of ranks beyond the contract: what each holds, what they say together, how one that fails is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters import registry
from adapters.conformance.case import Case, Prepared, bits, load, prepare_case, run, text
from adapters.contract import (
    DeviceLost,
    LoadedModel,
    LoadOptions,
    Logits,
    MovableKv,
    NumericalClass,
    Precision,
    Segment,
    TensorParallelAdapter,
    Unsupported,
    silent,
)
from adapters.decoder.spec import DecoderSpec
from adapters.torch_device import rank_group
from adapters.torch_device.model import TorchModel
from adapters.torch_device.rank_group import RankGroup
from adapters.torch_device.ranks import SplitRunner
from adapters.torch_device.split import split_decoder
from adapters.torch_device.weights import read_decoder, read_prepared_tensors
from device_profiles.workload import ModelSpec
from tests.support import tiny_models
from tests.tensor_parallel.conftest import RANKS, Split


def list_rank_processes(model: LoadedModel) -> list[psutil.Process]:
    assert isinstance(model, TorchModel)
    assert isinstance(model._runner, SplitRunner)
    return [psutil.Process(one.process.pid) for one in model._runner.ranks.processes]


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that in 30 s")


def read_rows(prepared: Prepared, precision: Precision) -> tuple[Logits, ModelSpec]:
    """Return a text's logits, and the spec, of a model whose activations have that format."""
    chosen = NumericalClass(precision, precision)
    options = LoadOptions(slots=1, max_batch_rows=64, kv_cache_bytes=16 << 20, numerical_class=chosen)
    model = prepared.adapter.load(prepared.path, options, silent)
    try:
        return run(model, 0, text(model, 70), [33, 1, 36]), model.spec
    finally:
        model.close()


def test_two_ranks_say_what_the_whole_says(prepared: Prepared, whole: Prepared) -> None:
    """In float32 to the rounding of sums, in bfloat16 as near that as the whole is."""
    exact, rounded = (read_rows(whole, one) for one in (Precision.FP32, Precision.BF16))
    split, split_rounded = (read_rows(prepared, one) for one in (Precision.FP32, Precision.BF16))
    assert np.allclose(split[0], exact[0], atol=1e-5 * float(np.abs(exact[0]).max()))
    assert np.array_equal(split[0].argmax(axis=1), exact[0].argmax(axis=1))
    errors = [float(np.sqrt(np.mean((one[0] - exact[0]) ** 2))) for one in (split_rounded, rounded)]
    assert errors[0] <= 1.1 * errors[1]
    specs = [one[1] for one in (split, split_rounded)]
    assert specs == [exact[1], rounded[1]], "all ranks together take what the whole takes"


def test_pages_of_all_ranks_go_along_with_a_sequence(model: LoadedModel) -> None:
    assert isinstance(model, MovableKv)
    tokens = text(model, 50)
    expected = run(model, 0, tokens, [40, 10])
    pages = np.concatenate(list(model.export_kv(0, 40)))
    model.release(0)
    run(model, 1, tokens[::-1], [50])  # what slot 0 gets was another's
    model.import_kv(0, 40, pages)
    assert np.array_equal(bits(run(model, 0, tokens, [10], start=40)), bits(expected[40:]))


def test_a_rank_that_is_killed_is_a_lost_device_and_leaves_no_process(prepared: Prepared) -> None:
    model = load(prepared)
    batch = [Segment(0, 0, text(model, 8), (7, 8))]
    model.forward(batch)
    [other] = list_rank_processes(model)
    assert os.getpgid(other.pid) == other.pid
    other.send_signal(signal.SIGKILL)
    with pytest.raises(DeviceLost, match=rf"rank 1 of tensor parallelism \(process {other.pid}\) ended by SIGKILL"):
        model.forward(batch)
    with pytest.raises(DeviceLost, match="closed"):
        model.forward(batch)
    model.discard(0)
    assert not other.is_running()


def test_a_rank_that_hangs_is_a_lost_device_in_bounded_time(prepared: Prepared) -> None:
    model = load(prepared)
    batch = [Segment(0, 0, text(model, 8), (7, 8))]
    model.forward(batch)
    [other] = list_rank_processes(model)
    other.suspend()
    with pytest.raises(DeviceLost, match=rf"rank 1 of tensor parallelism \(process {other.pid}\) is stuck"):
        model.forward(batch)
    assert not other.is_running(), "what is stopped is ended too"


def ignores_interrupts(process: int) -> bool:
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    ignored = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)


_WORKER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs begin with it ignored
from adapters.torch_device.ranks import RankProcess
print(RankProcess(1).process.pid, flush=True)
sys.stdin.read()
"""


def test_no_rank_outlives_a_process_that_is_killed_even_while_it_is_stopped() -> None:
    command = [sys.executable, "-c", _WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        other = psutil.Process(int(worker.stdout.readline()))
        wait_until(lambda: ignores_interrupts(other.pid))  # it asked the kernel to end it just before
        other.suspend()
        worker.kill()
    wait_until(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)


def test_a_rank_that_cannot_load_says_why(prepared: Prepared, whole: Prepared, tmp_path: Path) -> None:
    copy = tmp_path / "prepared"
    copy.mkdir()
    for path in whole.path.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    (copy / "layer-00001.safetensors").write_bytes(b"no tensors")
    before = psutil.Process().children()
    with pytest.raises(Exception, match=r"layer-00001\.safetensors cannot be read"):
        Split(RANKS, copy).load(copy, LoadOptions(), silent)
    assert psutil.Process().children() == before


@pytest.mark.parametrize("weights", ["", "int8", "int4"])
def test_parts_of_all_ranks_are_the_tensors(case: Case, whole: Prepared, shared_store: Path, weights: str) -> None:
    path = whole.path
    if weights:
        pytest.importorskip("torchao")
        path = prepare_case(replace(case, weights=weights), registry.get(case.adapter), shared_store).path
    decoder = read_decoder(path)
    tensors = dict(read_prepared_tensors(path, decoder, decoder.all_layers))
    parts = split_decoder(decoder, 3)
    held = [dict(read_prepared_tensors(path, decoder, decoder.all_layers, part)) for part in parts]
    for name, tensor in tensors.items():
        cut = parts[0].find_cut(name)
        pieces = [one[name].float32() for one in held]
        if cut is None:
            assert all(np.array_equal(piece, tensor.float32()) for piece in pieces)
        elif name.rpartition(".")[2] not in ("key", "value"):  # three ranks share two key heads
            axis = 0 if cut.columns is None else 1
            assert np.array_equal(np.concatenate(pieces, axis=axis), tensor.float32()), name


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_same_bits_however_many_rows_there_are(ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows are few, so that all parts are gathered, and many, so that they are reduced or added by columns."""
    parts = [
        torch.randn((1, 700, 771), generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(ranks)
    ]
    expected = sum((part.float() for part in parts[1:]), parts[0].float()).to(dtype)
    assert parts[0].numel() * dtype.itemsize > rank_group._REDUCED_BYTES

    def add(rank: int) -> list[torch.Tensor]:
        group = RankGroup(rank, ranks)
        group.connect(tmp_path / "ranks", torch.device("cpu"), 60.0)
        return [group.add(parts[rank][:, :rows].clone()) for rows in (1, 7, 700)]

    with ThreadPoolExecutor(ranks) as pool, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rank_group, "_SPREAD_BYTES", rank_group._REDUCED_BYTES)
        for sums in pool.map(add, range(ranks)):
            assert all(torch.equal(total, expected[:, : total.shape[1]]) for total in sums)


SHAPES = st.builds(
    lambda keys, shared, size, mlp, tokens: (keys, keys * shared, size, mlp, tokens),
    *(st.integers(1, 6), st.integers(1, 6), st.sampled_from([16, 64]), st.integers(8, 300), st.integers(8, 600)),
)


@given(SHAPES, st.integers(1, 8))
def test_ranks_share_any_model_and_no_part_of_it_twice(shape: tuple[int, int, int, int, int], ranks: int) -> None:
    keys, heads, size, mlp, tokens = shape
    decoder = DecoderSpec(
        family="llama",
        layers=1,
        hidden=64,
        context_length=64,
        norm_epsilon=1e-6,
        heads=heads,
        kv_heads=keys,
        head_dim=size,
        mlp=mlp,
        vocabulary_size=tokens,
        activation="silu",
        query_scale=1.0,
        ropes=(),
        windows=(),
        tied_embeddings=True,
    )
    if ranks > decoder.most_ranks:
        with pytest.raises(Unsupported, match=f"{ranks} ranks cannot share a model"):
            split_decoder(decoder, ranks)
        return
    parts = split_decoder(decoder, ranks)
    for name, count in (("heads", heads), ("mlp", mlp), ("tokens", tokens), ("outputs", tokens)):
        assert [one for part in parts for one in getattr(part, name)] == list(range(count))
        assert all(getattr(part, name) for part in parts), name
    for part in parts:  # each query head finds its key head, at the place that attention takes it from
        per_key = len(part.heads) // len(part.kv_heads)
        assert len(part.heads) == per_key * len(part.kv_heads)
        for place, head in enumerate(part.heads):
            assert part.kv_heads[place // per_key] == head // (heads // keys)


def test_a_rank_holds_its_share_of_weights_and_cache(prepared: Prepared, tmp_path: Path) -> None:
    source = tiny_models.write_model(
        tmp_path / "wide", "llama", kind="BF16", hidden_size=512, intermediate_size=2048, num_hidden_layers=6
    )
    case = replace(prepared.case, source=source)
    found = prepare_case(case, registry.get("torch_device"), tmp_path / "store")
    decoder = read_decoder(found.path)
    for part in split_decoder(decoder, RANKS):
        held = sum(
            tensor.float32().size for _, tensor in read_prepared_tensors(found.path, decoder, decoder.all_layers, part)
        )
        assert held < 0.51 * decoder.matrix_elements


def test_places_are_told_and_missing_devices_refused() -> None:
    adapter = registry.get("torch_device")
    assert isinstance(adapter, TensorParallelAdapter)
    asked = LoadOptions(threads=3, tensor_parallel=2)
    assert list(adapter.list_rank_places(asked)) == ["CPU, 2 threads", "CPU, 1 thread"]
    count = torch.cuda.device_count()
    if not count:
        pytest.skip("torch sees no CUDA device here")
    with pytest.raises(Unsupported, match=f"torch does not see CUDA:{count} here. Set tensor_parallel to {count}"):
        adapter.list_rank_places(LoadOptions(device="CUDA:0", tensor_parallel=count + 1))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="torch sees fewer than two CUDA devices here")
def test_two_devices_say_what_one_says(whole: Prepared) -> None:
    loaded = {
        ranks: whole.adapter.load(whole.path, LoadOptions(device="CUDA:0", tensor_parallel=ranks), silent)
        for ranks in (1, RANKS)
    }
    tokens = text(loaded[1], 70)
    alone, split = (run(loaded[ranks], 0, tokens, [33, 1, 36]) for ranks in (1, RANKS))
    assert np.allclose(split, alone, atol=5e-2 * float(np.abs(alone).max()))
    [other] = list_rank_processes(loaded[RANKS])
    other.send_signal(signal.SIGKILL)
    with pytest.raises(DeviceLost):
        loaded[RANKS].forward([Segment(1, 0, tokens, (0, 1))])
