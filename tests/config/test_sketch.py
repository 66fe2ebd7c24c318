"""Cluster sketches: what is wrong is told with its line, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.hosts import host_names
from orchestrator.config.sketch import load_sketch
from orchestrator.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "docs" / "cluster-sketch.yaml"
HEAD = "hosts:\n  - name: a\n    memory: 64 GiB\n    devices: [{device: nvidia-l4}]\n"
SHAPE = "{layers: 1, hidden: 8, heads: 1, kv_heads: 1, head_dim: 8, mlp: 8, vocabulary: 8}"  # one line

# (text, line, what the message must hold)
WRONG = [
    ("", 1, ["is empty; it needs at least hosts"]),
    ("hosts: []\n", 1, ["hosts: must have at least 1 item(s)"]),
    ("links: {}\n", 1, ["hosts: is missing"]),
    ("hosts:\n  - name: a\n    memory: 64 GiB\n", 2, ["hosts[0].devices: is missing"]),
    (HEAD.replace("memory:", "memry:"), 3, ["hosts[0].memry: unknown key", "did you mean 'memory'"]),
    (HEAD.replace("64 GiB", "64"), 3, ["hosts[0].memory: needs a unit"]),
    (HEAD.replace("{device: nvidia-l4}", "{device: nvidia-l4, count: 0}"), 4, ["devices[0].count: must be 1 to 1024"]),
    (HEAD + "  - name: a\n    memory: 1 GiB\n    devices: [{device: x}]\n", 5, ["'a' is there twice; use `count`"]),
    (HEAD + "links:\n  same_zone: {rtt_ms: -1, gbit_per_s: 1}\n", 6, ["links.same_zone.rtt_ms: must be 0 to 60000"]),
    (HEAD + "links:\n  same_zone: {rtt_ms: 1}\n", 6, ["links.same_zone.gbit_per_s: is missing"]),
    (
        HEAD + "links:\n  between:\n    - {hosts: [a, b], rtt_ms: 1, gbit_per_s: 1}\n",
        7,
        ["links.between[0].hosts: there is no host 'b'"],
    ),
    (HEAD + f"drafts:\n  - {{name: d, shape: {SHAPE}, acceptance: 0.5}}\n", 5, ["drafts: go with `target`"]),
    (HEAD + f"target:\n  name: t\n  shape: {SHAPE[:-1]}, experts: 8}}\n", 7, ["target.shape.experts: unknown key"]),
    (
        HEAD + f"target:\n  name: t\n  shape: {SHAPE[:-1]}, context_window: 8}}\n",
        7,
        ["target.shape.context_window: unknown key", "vocabulary"],
    ),
    (HEAD + f"target:\n  name: t\n  shape: {SHAPE}\n  weights: [int3]\n", 8, ["target.weights", "'int3'"]),
    (HEAD + "placement:\n  pin_targt: [a]\n", 6, ["placement.pin_targt: unknown key", "did you mean 'pin_target'"]),
    (HEAD.replace("nvidia-l4}", "nvidia-l4, price_per_hour: -1}"), 4, ["devices[0].price_per_hour: must be 0 to"]),
    (HEAD + "placement:\n  objective: price\n", 6, ["placement.objective", "'price'"]),
    (HEAD + "exactness: bits\n", 5, ["exactness", "'bits'"]),
]


@pytest.mark.parametrize(("text", "line", "says"), WRONG)
def test_every_problem_names_its_line(tmp_path, text, line, says):
    path = tmp_path / "sketch.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_sketch(path)
    told = [one for one in str(refused.value).splitlines() if one.startswith(f"{path}:{line}: ")]
    assert any(all(part in one for part in says) for one in told), str(refused.value)


def test_the_shipped_sketch_is_what_its_text_says():
    sketch = load_sketch(SHIPPED)
    assert [name for host in sketch.hosts for name in host_names(host)] == ["gpu-1", "gpu-2", "laptop"]
    assert sketch.target is not None
    assert sketch.target.shape.layers == 32
    assert sketch.placement is not None
    assert sketch.placement.concurrency == 4
