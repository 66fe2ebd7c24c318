"""`bench exactness` has the same figures for every runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from adapters.names import CONVERTING_ADAPTERS, LLAMA_CPP
from tests.support.conformance import NO_FORK
from tests.support.tiny_gguf import Tiny, write

WORDS = (*map(chr, range(33, 126)), "xy")


def measure(directory: Path, adapter: str, outrider: Callable[..., CompletedProcess[str]]) -> dict[str, Any]:
    """Return the figures of a tiny model."""
    config, out = directory / "cluster.yaml", directory / f"{adapter}.json"
    config.write_text(
        f"model: {{source: tiny.gguf}}\nlimits: {{kv_cache: 16 MiB}}\ndrafts: [{{method: suffix}}]\n"
        f"store: {{directory: '{directory}/store'}}\ndevices: {{threads: 1}}\n"
    )
    counts = ["--limit", "2", "--max-tokens", "4", "--quality-limit", "1"]
    done = outrider("bench", "exactness", "--config", str(config), "--adapter", adapter, "--json", str(out), *counts)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())["summary"]
    return found


@NO_FORK
@pytest.mark.parametrize("other", [one for one in CONVERTING_ADAPTERS if one != "torch_device"])
def test_llama_cpp_has_the_figures_of_other_runtimes(tmp_path: Path, outrider, other: str) -> None:
    sizes = Tiny("llama", hidden=128, heads=2, kv_heads=1, head_dim=64, context=512, vocabulary=len(WORDS), words=WORDS)
    write(tmp_path / "tiny.gguf", sizes, {"tokenizer.chat_template": "{{ messages[0].content }}"})
    ours, theirs = (measure(tmp_path, adapter, outrider) for adapter in (LLAMA_CPP, other))
    assert ours.keys() == theirs.keys()
    assert ours["candidates"][0].keys() == theirs["candidates"][0].keys()
    assert {"perplexity_ratio", "agreement", "class_vs_fastest"} <= {name for name in ours if ours[name] is not None}
    assert (ours["adapter"], ours["mismatches"], ours["compared"]) == (LLAMA_CPP, 0, 8)
    assert ours["row_invariant"]
