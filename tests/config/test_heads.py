"""Heads in cluster.yaml: other runtimes, split targets and other models' heads are refused at their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import HeadOptions
from tests.support import tiny_models
from tests.support.tiny_heads import write_head

GOOD = """\
model:
  source: tiny
  adapter: torch_device
drafts:
  - method: suffix
  - method: head
    source: head
"""


def write_config(directory: Path, text: str) -> Path:
    tiny_models.write_model(directory / "tiny", "llama")
    write_head(directory / "head", range(4, 260))
    write_head(directory / "narrow", range(4, 260), hidden=32)
    write_head(directory / "other", range(4, 260), vocab_size=300)
    write_head(directory / "deep", range(4, 260), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]})
    (directory / "cluster.yaml").write_text(text)
    return directory / "cluster.yaml"


def test_a_head_reaches_the_worker(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, GOOD))
    head = engine_options(config, tmp_path).drafters[1]
    assert isinstance(head, HeadOptions)
    assert (head.name, head.place, head.directory) == ("head", "drafts[1]", str(tmp_path / "head"))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("torch_device", "openvino_rt", r":6: drafts\[1\]\.method: openvino_rt gives no hidden states; .*torch_device"),
        ("torch_device", "auto", r":6: drafts\[1\]\.method: the plan may choose a runtime that gives no hidden states"),
        (
            "torch_device",
            "torch_device\n  replicas: [{}, {adapter: onnx_rt}]\n  alike: false",
            r"drafts\[1\]\.method: onnx_rt gives no hidden states",
        ),
        (
            "torch_device",
            "torch_device\n  tensor_parallel: 2",
            r":7: drafts\[1\]\.method: needs all layers of its target in one process",
        ),
        ("source: head", "source: nowhere", r":7: drafts\[1\]\.source: .*nowhere is no directory"),
        (
            "source: head",
            "source: narrow",
            r":7: drafts\[1\]\.source: narrow/config\.json: hidden_size is 32, .* has 64",
        ),
        ("source: head", "source: other", r"other/config\.json: vocab_size is 300, and tiny has 320"),
        ("source: head", "source: deep", r"deep/config\.json: it reads layers 1, 2, 9 .*, and the target has 4"),
        ("source: head", "source: head\n    weights: int8", r":8: drafts\[1\]\.weights"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(write_config(tmp_path, GOOD.replace(old, new, 1)))
