"""The tensors that a check looks for are those that builders ask for: neither can change without the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.decoder.from_safetensors import tensor_names
from adapters.decoder.gguf_spec import tensor_name
from adapters.decoder.spec import Weights
from adapters.hf_directory import open_weights
from adapters.source_meter import SourceMeter
from tests.support import tiny_models

METER = SourceMeter(Path(__file__), lambda done, total: None)
NAMES = [name for name in tiny_models.CONFIGS if not name.startswith("gemma2")]


class Recorder:
    """Weights that note what is asked of them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.spec, self.label, self.output_ids = weights.spec, weights.label, weights.output_ids
        self.asked: set[str] = set()

    def tensor(self, name: str) -> Any:
        self.asked.add(name)
        return self._weights.tensor(name)


def build_openvino(weights: Weights, directory: Path) -> None:
    from adapters.openvino_rt.build import write_model

    write_model(weights, directory / "model.xml", METER)


def build_onnx(weights: Weights, directory: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: outrider extras install onnx")
    from adapters.onnx_rt.graph import write_graph

    write_graph(weights, directory, METER)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("build", [build_openvino, build_onnx])
def test_builders_ask_for_the_tensors_of_the_list(tmp_path, name, build):
    weights = Recorder(open_weights(tiny_models.write_model(tmp_path / "m", name, num_hidden_layers=2)))
    build(weights, tmp_path)
    listed = weights.spec.list_tensors()
    assert sorted(weights.asked) == sorted(listed)
    assert len(set(listed)) == len(listed)
    assert set(tensor_names(weights.spec)) == set(listed)
    assert len({tensor_name(name) for name in listed}) == len(listed)
