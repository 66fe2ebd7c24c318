"""`python -m tests.support.triton_kernel`: the kernel that torch writes for CUDA of our attention, without a device.

torch is told of a device that is not there, and stopped once it has written its source. With TRITON_INTERPRET=1 triton
runs that on tensors of the CPU, and it is compared with the plain form; else triton compiles it for the device. It
reaches into torch 2.13 and triton 3.9, and is no part of what is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from ast import literal_eval
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.compile_fx
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch.nn.attention import flex_attention
from triton.backends.compiler import GPUTarget

from adapters.torch_device.attention import KvPool, LayerKv
from adapters.torch_device.flex import FAR, PageTables, attend_pages, compile_attention
from adapters.torch_device.plan import TILE_ROWS
from tests.support.fake_cuda import fake_cuda

CPU, CUDA, BLOCK, TARGET = torch.device("cpu"), torch.device("cuda:0"), 32, GPUTarget("cuda", 90, 32)
TABLES = np.array([[2, 3, 5, 20], [1, 7, 20, 20], [3, 2, 5, 7], [1, 21, 20, 20], [3, 7, 3, 2]])
"""Of five tiles over a pool of 20 blocks: how many blocks each reads, and which."""
FIRST = (40, 5, 64, 0, 75)
"""The position of each tile's first row."""
_DEVICE = SimpleNamespace(
    name="",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    total_memory=1 << 36,
    L2_cache_size=50 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)


class _WrittenError(Exception):
    """What torch has written is known."""


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> Any:
        return CPU

    def is_active(self) -> bool:
        return True


def is_in_chunk(batch: Any, head: Any, row: Any, place: Any) -> Any:
    return row // 24 == place // 24


_ON_THE_HOST = {
    r"async_compile\.triton\(": "_load(",
    r"^async_compile\.wait.*$": "",
    r"^.*import _cuda_getCurrentRawStream.*$": "",
    r"empty_strided_cuda\((.*), (torch\.\w+)\)$": r"_allocate(\1, dtype=\2)",
    r"with torch\.cuda\._DeviceGuard\(0\):": "if True:",
    r"torch\.cuda\.set_device\(0\)$": "pass",
    r"= get_raw_stream\(0\)$": "= 0",
}
"""What of the source asks for the device, and what stands there instead."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "softcap": {"softcap": 2.0},
    "rule": {"rule": is_in_chunk},
    "sinks": {"sinks": True},
    "short values": {"dims": (24, 16)},
}


def prepare(case: dict[str, Any], device: Any, dtype: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `attend_pages`; the pool is NaN but for the blocks that are read."""
    torch.manual_seed(0)
    key_dim, value_dim = case.get("dims", (64, 64))
    pool = KvPool([LayerKv(2, key_dim, value_dim)], blocks=20, block=BLOCK, dtype=dtype, device=device)
    tables = PageTables(pool, device, 8)
    pages = tables.get_pages(len(TABLES))
    if device.type == "cpu":
        tables.send(TABLES, pages)
        for cache in pool._caches[0]:
            cache.fill_(torch.nan)
            cache[[2, 3, 5, 7]] = torch.randn(4, BLOCK, *cache.shape[2:]).to(dtype)
            cache[21] = 0.0
    rows = len(TABLES) * TILE_ROWS
    query = torch.randn((1, rows, 6, key_dim), dtype=dtype, device=device).transpose(1, 2)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    if device.type == "cpu":
        positions.copy_(torch.cat([torch.arange(first, first + TILE_ROWS) for first in FIRST]))
    window = torch.full((), case.get("window", FAR), dtype=torch.int64, device=device)
    options: dict[str, Any] = {name: case[name] for name in ("softcap", "rule") if name in case}
    if "sinks" in case:
        options["sinks"] = torch.randn(6, dtype=torch.float32, device=device)
    return (query, *pool.get_views(0), pages, positions, window, BLOCK), options


def write_kernels(case: dict[str, Any], dtype: Any) -> tuple[str, list[Any]]:
    """Return what torch writes of a call on CUDA, and the inputs of that by name; numbers as they are."""
    patch, written, inputs = pytest.MonkeyPatch(), [], []
    compile_fx = torch._inductor.compile_fx.compile_fx

    def note(graph: Any, examples: Any, *rest: Any, **options: Any) -> Any:
        for node, example in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True):
            inputs.append(node.target if isinstance(example, torch.Tensor) else int(example))
        return compile_fx(graph, examples, *rest, **options)

    def stop(_: Any, source: Any, *rest: Any) -> None:
        written.append(source.value)
        raise _WrittenError

    device = {
        "get_device_properties": _DEVICE,
        "get_compute_capability": 90,
        "get_device_capability": (9, 0),
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
        "get_rng_state": torch.zeros(1),
        "set_rng_state": None,
        "_lazy_init": None,
        "synchronize": None,
    }
    for place in (CudaInterface, CudaInterface.Worker, torch.cuda):
        for name, value in device.items():
            patch.setattr(place, name, staticmethod(lambda *_, value=value, **__: value), raising=False)
    patch.setattr(torch.version, "cuda", "12.8")
    patch.setattr(torch._inductor.compile_fx, "compile_fx", note)
    patch.setattr(GraphLowering, "_compile_to_module_lines", stop)
    for passes in (joint_graph, post_grad):
        patch.setattr(passes, "lazy_init", lambda *_, **__: None)
    torch._dynamo.reset()
    try:
        with config.patch(compile_threads=1, force_disable_caches=True), fake_cuda(patch):
            args, options = prepare(case, CUDA, dtype)
            compile_attention()(*args, **options)
    except Exception:  # torch wraps what stopped it
        if not written:
            raise
    finally:
        patch.undo()
    return written[0], inputs


class Kernel:
    """A kernel that torch wrote, as triton has it."""

    def __init__(self, name: str, source: str, root: Path) -> None:
        plain = re.sub(r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton\.jit)", "", source, flags=re.DOTALL)
        plain = plain.replace("triton_helpers.set_driver_to_gpu()", "")
        if os.environ.get("TRITON_INTERPRET") == "1":  # which has none of the device's own functions
            plain = re.sub(r"libdevice\.tanh\((\w+)\)", r"(2.0 * tl.sigmoid(2.0 * \1) - 1.0)", plain)
        path = root / f"{name}.py"
        path.write_text(plain)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.name, self.source, self.function = name, source, getattr(module, name)

    def run(self, *args: Any, stream: Any = None) -> None:
        """Run on tensors of the CPU: attention over the grid that comes last, others over one of a row."""
        if self.name.startswith("triton_tem"):
            self.function[args[-3:]](*args[:-3])
        else:
            self.function[(-(-args[-1] // 64),)](*args, XBLOCK=64)

    def compile(self) -> int:
        """Return how many bytes of machine code the device gets."""
        meta = re.search(r"'signature': (\{.*?\})", self.source)
        assert meta is not None
        signature = literal_eval(meta.group(1))
        blocks = {name: 64 for name, kind in signature.items() if kind == "constexpr"}
        made = triton.compile(triton.compiler.ASTSource(self.function, signature, blocks), target=TARGET)
        return len(made.asm["cubin"])


def run(case: dict[str, Any], *, interpret: bool) -> str:
    """Return what came of a case, in words."""
    dtype = torch.float32 if interpret else torch.bfloat16
    source, names = write_kernels(case, dtype)
    made: list[Kernel] = []
    with tempfile.TemporaryDirectory() as root:

        def load(name: str, text: str, **_: Any) -> Kernel:
            made.append(Kernel(name, text, Path(root)))
            return made[-1]

        place: dict[str, Any] = {"_load": load, "_allocate": torch.empty_strided}
        for pattern, other in _ON_THE_HOST.items():
            source = re.sub(pattern, other, source, flags=re.MULTILINE)
        exec(source, place)  # noqa: S102 - what torch wrote just now
        if not interpret:
            return f"{[kernel.name for kernel in made]}: {[kernel.compile() for kernel in made]} bytes"
        args, options = prepare(case, CPU, dtype)
        query, key, value, pages, positions, window, _ = args
        known = {"query": query, "key": key, "value": value, "positions": positions, "window": window} | options
        known |= {f"pages_{number}": part for number, part in enumerate(pages)}
        given = [name if isinstance(name, int) else known[name[2:-1]] for name in names]
        answer = place["call"](given)[0]
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
        plain = attend_pages(query, key.nan_to_num(), value.nan_to_num(), *args[3:], **options)
        assert torch.allclose(answer, plain, atol=1e-5), (answer - plain).abs().max()
        return f"{len(made)} kernels, at most {(answer - plain).abs().max():.1e} apart"


def main() -> None:
    """Run all cases, or those that are named."""
    triton.runtime.driver.set_active(_Driver())
    for name in sys.argv[1:] or CASES:
        outcome = run(CASES[name], interpret=os.environ.get("TRITON_INTERPRET") == "1")
        sys.stdout.write(f"{name}: {outcome}\n")


if __name__ == "__main__":
    main()
