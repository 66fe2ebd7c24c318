"""What runtimes say when something fails, and what that means."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from adapters.contract import DeviceLost, MemoryCorrupt, NoKernel, OutOfMemory, Overheated, RuntimeFailed
from adapters.cpuinfo import ISA_CAPS
from adapters.failures import classify_failure
from adapters.hardware import processor
from tests.support import engines


class ItsOwnOutOfMemory(RuntimeError):
    """A runtime's type for it."""


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("std::bad_alloc", OutOfMemory),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ...", OutOfMemory),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", OutOfMemory),
        ("Exception from src/a.cpp:1:\nFailed to allocate 176160768 bytes of memory\n", OutOfMemory),
        ("[CPU] FullyConnectedCompressed node with name 'MatMul_344' can't alloc", OutOfMemory),
        ("[GPU] clEnqueueNDRangeKernel, error code: -4 CL_MEM_OBJECT_ALLOCATION_FAILURE", OutOfMemory),
        ("bfc_arena.cc:376 BFCArena::AllocateRawInternal Failed to allocate memory", OutOfMemory),
        ("CUDA error: uncorrectable ECC error encountered", MemoryCorrupt),
        ("cudaErrorECCUncorrectable", MemoryCorrupt),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", MemoryCorrupt),
        ("NVRM: Xid (PCI:0000:01:00): 48, pid=1, An uncorrectable double bit error", MemoryCorrupt),
        ("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.", DeviceLost),
        ("the GPU was stopped by thermal protection", Overheated),
        ("CUDA error: an illegal memory access was encountered", DeviceLost),
        ("DXGI_ERROR_DEVICE_REMOVED", DeviceLost),
        ("ZE_RESULT_ERROR_DEVICE_LOST", DeviceLost),
        ("could not create a primitive", OutOfMemory),
        ("[CPU] node 'MatMul_52' could not create a primitive descriptor for the inner product", NoKernel),
        ("could not execute a primitive", RuntimeFailed),
        ("", RuntimeFailed),
    ],
)
def test_words_tell_what_happened(said, kind):
    failure = classify_failure(RuntimeError(said), "a runtime")
    assert type(failure) is kind
    assert "\n" not in str(failure)
    assert "a runtime" in str(failure)
    assert not getattr(failure, "can_go_on", False)


def test_a_cap_of_instruction_sets_is_named_where_it_leaves_no_code(monkeypatch):
    error = RuntimeError("could not create a primitive descriptor for the inner product")
    for name in ISA_CAPS:
        monkeypatch.delenv(name, raising=False)
    assert "environment" not in str(classify_failure(error, "it"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in str(classify_failure(error, "it"))
    assert "memory" not in str(classify_failure(error, "it"))


@pytest.mark.model
def test_a_runtime_without_code_for_the_model_says_so_once_and_names_the_cap(first_layers_path, tmp_path):
    """OpenVINO looks at the processor itself: under the cap it asks oneDNN for products that this leaves out."""
    if "avx512f" not in processor().isa:
        pytest.skip("nothing to take away: this processor has no avx512f")
    (tmp_path / "cluster.yaml").write_text(
        f"model: {{source: '{first_layers_path}', adapter: openvino_rt}}\n"
        f"store: {{directory: '{tmp_path}'}}\nlimits: {{kv_cache: 96 MiB}}\ndrafts: []\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.loading", str(tmp_path / "cluster.yaml")],
        capture_output=True,
        text=True,
        cwd=engines.ROOT,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        check=False,
        timeout=240,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kind"] == "configuration", "it can never work here"
    assert not report["restartable"]
    assert report["message"].count("could not create a primitive descriptor") == 1
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in report["message"]
    assert "memory" not in report["message"]


def test_types_tell_too_and_the_line_that_tells_is_shown():
    for error in (MemoryError(), ItsOwnOutOfMemory("odd")):
        assert type(classify_failure(error, "it", out_of_memory=(ItsOwnOutOfMemory,))) is OutOfMemory
    lines = "Exception from src/infer_request.cpp:224:\nException from src/node.cpp:1:\nthe graph is odd"
    assert str(classify_failure(RuntimeError(lines), "it", last_line=True)) == "it failed: the graph is odd"
    starved = RuntimeError(f"{lines}\nout of memory\nmore")
    assert str(classify_failure(starved, "it")) == "it ran out of memory: out of memory"


@pytest.mark.model
@pytest.mark.parametrize("runtime", ["openvino_rt", "onnx_rt"])
def test_a_runtime_that_really_has_no_memory_goes_on_in_smaller_forwards(first_layers_path, shared_store, runtime):
    """The process may have 16 MiB more than loading took, and forwards as large as they may be need more.

    OpenVINO makes kernels for new numbers of rows as it goes, and keeps buffers: it may end with that very error.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.starved", runtime, str(first_layers_path), str(shared_store)],
        capture_output=True,
        text=True,
        cwd=engines.ROOT,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same"]
    assert report["tokens"] == 72 or (runtime == "openvino_rt" and report["ended"])
    assert report["failures"] > 0
    assert 0 < report["rows"] < 1024
