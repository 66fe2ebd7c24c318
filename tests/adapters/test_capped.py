"""Real runtimes under capped instruction sets, which stand for other processors: rows keep their bits.

oneDNN (in OpenVINO and torch) and ATen can be capped by the environment. ONNX Runtime's kernels cannot: it runs as it
is. A cap that takes nothing away from this processor, or that it has not enough for, is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from adapters import registry
from adapters.contract import silent
from adapters.hardware import processor
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from adapters.variant import Variant
from tests.support.capped import SWITCHES, Case

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parents[2]
Finding = dict[str, Any]
Examine = Callable[[str, str], list[Finding]]


@dataclass(frozen=True)
class Cap:
    """`needs`: instruction sets that it leaves; `takes`: those of which it takes at least one away, none: no cap.
    `classes` by runtime, as tests.support.capped.Case.parse reads them."""

    classes: dict[str, list[str]]
    switches: dict[str, str] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()


BF16, VNNI, CORE = {"avx512_bf16"}, {"avx512_vnni"}, {"avx512f", "avx512bw"}
AMX = {"amx_tile", "amx_int8", "amx_bf16"}
CAPS = {
    "none": Cap(
        {
            "openvino_rt": ["auto", "fp32", "fp32@1"],
            "onnx_rt": ["fp32"],
            "torch_device": ["bf16/16", "fp32"],
        }
    ),
    "avx512_bf16": Cap(
        {"openvino_rt": ["fp32", "bf16"], "torch_device": ["bf16"]},
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        needs=frozenset(CORE | VNNI | BF16),
        takes=frozenset(AMX),
    ),
    "avx512_vnni": Cap(
        {"torch_device": ["bf16"]},  # OpenVINO's fp32 uses none of what it takes beside AMX
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
        needs=frozenset(CORE | VNNI),
        takes=frozenset(AMX | BF16),
    ),
    "avx512": Cap(
        {"openvino_rt": ["fp32"]},
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        needs=frozenset(CORE),
        takes=frozenset(AMX | BF16 | VNNI),
    ),
    "avx2_vnni": Cap(
        {"openvino_rt": ["fp32"], "torch_device": ["fp32"]},
        {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "ATEN_CPU_CAPABILITY": "avx2"},
        needs=frozenset({"avx2", "avx_vnni"}),
        takes=frozenset(CORE),
    ),
}
RUNS = [(runtime, name) for name, cap in CAPS.items() for runtime in cap.classes]


@pytest.fixture(scope="module")
def examine(first_layers_path, shared_store) -> Examine:
    """Examine a runtime under a cap, in a process of its own, once. The model is prepared here, under no cap."""
    known: dict[tuple[str, str], list[Finding]] = {}
    store, source = ModelStore(shared_store), ModelSource(first_layers_path, "first", str(first_layers_path))
    store.prepare(source, TokenizerRecipe(), silent)

    def examine_class(runtime: str, name: str) -> list[Finding]:
        cap, here = CAPS[name], set(processor().isa)
        if not cap.needs <= here:
            pytest.skip(f"this processor has no {', '.join(sorted(cap.needs - here))}")
        if cap.takes and not cap.takes & here:
            pytest.skip(f"nothing to take away: this processor has no {', '.join(sorted(cap.takes))}")
        if (runtime, name) not in known:
            store.prepare(source, Variant(registry.get(runtime)), silent)
            known[runtime, name] = run(runtime, cap, first_layers_path, shared_store)
        return known[runtime, name]

    return examine_class


def run(runtime: str, cap: Cap, source: Path, store: Path) -> list[Finding]:
    """Run tests/support/capped.py."""
    native = {str(precision) for precision in registry.get(runtime).devices()[0].precisions}
    # What is chosen by itself is float32 where no other floats are native: that is a case of its own.
    computed = native | {"auto"} if native & {"bf16", "fp16"} else native
    classes = [kind for kind in cap.classes[runtime] if Case.parse(runtime, kind).activations in computed]
    environment = {name: value for name, value in os.environ.items() if name not in SWITCHES} | cap.switches
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.capped", runtime, str(source), str(store), *classes],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("runtime", "cap"), RUNS, ids=[" ".join(run) for run in RUNS])
def test_rows_and_tokens_are_the_same_where_it_is_said(examine, runtime, cap):
    for finding in examine(runtime, cap):
        sys.stdout.write(f"{finding}\n")  # which processor this was, for whoever reads the log
        if "refused" in finding and finding["asked"] == "bf16":  # by itself it may keep no bits, as with AMX
            assert "no numerical class is fit for exactness bit" in finding["refused"]
            continue
        assert "refused" not in finding, finding
        assert finding["row_invariant"], finding
        assert (finding["differing"], finding["changed"]) == ([], []), finding
        assert finding["accepted"] > 0 or finding["threads"], "speculation was at work"


def test_fp32_on_openvino_has_one_fingerprint_under_every_cap_of_avx512(examine):
    """On one thread too. It was the same on an Intel Xeon with AMX and on AMD's Zen 5."""
    here = set(processor().isa)
    if not here >= CORE:
        pytest.skip("this processor has no AVX-512")
    names = [
        name
        for name, cap in CAPS.items()
        if name != "avx2_vnni"
        and "openvino_rt" in cap.classes
        and cap.needs <= here
        and (not cap.takes or cap.takes & here)
    ]
    seen = [
        (name, finding["threads"], finding["fingerprint"])
        for name in names
        for finding in examine("openvino_rt", name)
        if finding["asked"] == "fp32"
    ]
    assert len(seen) == len(names) + 1
    assert len({digest for _, _, digest in seen}) == 1, seen
