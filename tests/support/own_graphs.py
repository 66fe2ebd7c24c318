"""Directories whose graph is run as it is: the forms that there are, and what their tests have alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adapters import registry
from adapters.contract import LayerRange, LoadedModel, LoadOptions, ModelRefused, NumericalClass, Precision, Segment
from adapters.ir_facts import IR_WEIGHTS
from adapters.model_source import check_source, resolve
from adapters.model_store import ModelStore
from adapters.variant import Variant
from tests.support.tiny_genai import write_genai
from tests.support.tiny_ir import write_ir

# Longer than the models' windows of 24, so that one that was lost would show.
TEXT = [(7 * place * place + 11 * place + 3) % 300 + 10 for place in range(48)]
_PROMPT = 30


@dataclass(frozen=True)
class GraphForm:
    """A form of directories. `adapter`: runs it; `refusal`: how all others refuse it, a regular expression.
    `write`: writes a small model of tests/support/tiny_models.py, `sample` by default; the same model's safetensors lie
    beside it, in DIRECTORY-safetensors. `family`: what its facts call that. `weights_file`, `graph_file`: in it."""

    title: str
    adapter: str
    refusal: str
    write: Callable[[Path, str], Path]
    sample: str
    family: str
    graph_file: str
    weights_file: str
    numerical_class: NumericalClass

    def prepare(self, source: Path, store: Path) -> Path:
        recipe = Variant(registry.get(self.adapter))
        return ModelStore(store).prepare(resolve(str(source), Path()), recipe, lambda *_: None, needed_bytes=1)

    def load(self, source: Path, store: Path, layers: LayerRange | None = None) -> LoadedModel:
        adapter: Any = registry.get(self.adapter)
        prepared = self.prepare(source, store)
        options = LoadOptions(kv_cache_bytes=1 << 24, slots=2, numerical_class=self.numerical_class)
        if layers is not None:
            return adapter.load_layers(prepared, options, layers, lambda *_: None)
        return adapter.load(prepared, options, lambda *_: None)


IR = GraphForm(
    title="OpenVINO IR",
    adapter="openvino_rt",
    refusal=r"OpenVINO's form \(IR\).* Set adapter: openvino_rt\.$",
    write=write_ir,
    sample="gemma3",
    family="gemma3_text",
    graph_file="openvino_model.xml",
    weights_file=IR_WEIGHTS,
    numerical_class=NumericalClass(Precision.FP32, Precision.FP16, quantization_group=32, apart=True, segment_rows=2),
)
GENAI = GraphForm(
    title="onnxruntime-genai",
    adapter="onnx_rt",
    refusal=r"onnxruntime-genai's form.* Set adapter: onnx_rt\.$",
    write=write_genai,
    sample="qwen3",
    family="qwen3",
    graph_file="model.onnx",
    weights_file="model.onnx.data",
    numerical_class=NumericalClass(Precision.FP32, Precision.FP32, 32, segment_rows=2, forward_rows=2),
)
FORMS = {form.title: form for form in (IR, GENAI)}


def compute(model: LoadedModel) -> NDArray[np.float32]:
    """Return the logits of TEXT: a prompt, six tokens that are taken back, and the rest one by one."""
    rows = [model.forward([Segment(0, 0, TEXT[:_PROMPT], (0, _PROMPT))]).logits.copy()]
    model.forward([Segment(0, _PROMPT, [5] * 6, (0, 6))])
    for place in range(_PROMPT, len(TEXT)):
        rows.append(model.forward([Segment(0, place, TEXT[place : place + 1], (0, 1))]).logits.copy())
    model.close()
    return np.concatenate(rows)


def expect_refusal(form: GraphForm, directory: Path, words: str) -> None:
    """Fail where the form's own runtime does not refuse a directory, in one line that `words` is found in."""
    with pytest.raises(ModelRefused, match=words) as refusal:
        check_source(str(directory), Path(), form.adapter)
    assert "\n" not in str(refusal.value)
