"""What optimum-intel exports of many architectures: which of them openvino_rt serves, and which it refuses by name.

`make slow` runs it where pip finds optimum-intel. Paged, in pieces and alone, each row is what OpenVINO computes of the
same graph as it was exported, stateful and at once: over sliding windows, experts, sinks and ropes alike.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from adapters.ir_facts import IR_FILE
from adapters.model_source import check_source
from tests.support import tiny_models
from tests.support.environments import make_environment, run_there
from tests.support.model_rows import loads_models
from tests.support.own_graphs import IR, TEXT, compute, expect_refusal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # the first one waits for all exports
# As optimum-intel 2.2 takes most architectures with: later ones it refuses for many, earlier ones know fewer.
PACKAGES = [
    "optimum-intel==2.2.0",
    "optimum==2.3.0",
    "transformers==5.0.0",
    "huggingface-hub<1.22",
    "tokenizers<=0.22.2",
]
EXACT = replace(IR, numerical_class=replace(IR.numerical_class, quantization_group=0))
SERVED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""By their names in tests/support/optimum_exports.py: their classes in config.json."""
REFUSED = {"lfm2": r"in a state \(cache_params\.past\.conv", "mamba": r"in a state \(cache_params\.past"}
FAR = 0.005
"""Of logits' standard deviation. A KV cache in 16 bits makes 0.002 at the most."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of exports, and `why.json` with what optimum-intel said of those that are not there."""
    root = tmp_path_factory.mktemp("optimum")
    python = make_environment(root / "venv", PACKAGES)  # torch and OpenVINO are those that are here
    script = Path(tiny_models.__file__).with_name("optimum_exports.py")
    printed = run_there(python, script, root, *SERVED, *REFUSED)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"name"')]
    (root / "why.json").write_text(json.dumps({line["name"]: line["why"] for line in lines}))
    return root


def compute_stateful(directory: Path) -> NDArray[np.float32]:
    """Return the logits of TEXT, as the graph says them in one forward without paging."""
    import openvino as ov

    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = ov.Core().compile_model(directory / IR_FILE, "CPU", settings)
    given = {
        "input_ids": np.array([TEXT]),
        "attention_mask": np.ones((1, len(TEXT)), np.int64),
        "position_ids": np.arange(len(TEXT))[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    names = {name for port in compiled.inputs for name in port.get_names()}
    outputs = compiled.create_infer_request().infer({name: given[name] for name in names & given.keys()})
    return np.asarray(next(iter(outputs.values()))[0])


@loads_models("openvino_rt", "OpenVINO IR", SERVED)
@pytest.mark.parametrize("name", SERVED)
def test_it_is_served_as_its_graph_says(exports: Path, name: str, tmp_path: Path) -> None:
    assert json.loads((exports / "why.json").read_text())[name] == ""
    tiny_models.write_tokenizer(exports / name)
    facts = check_source(str(exports / name), Path(), "openvino_rt")
    assert facts is not None
    assert (facts.layers, facts.vocabulary_size, facts.context_length) == (4, tiny_models.VOCABULARY, 256)
    mine, theirs = compute(EXACT.load(exports / name, tmp_path)), compute_stateful(exports / name)
    assert np.abs(mine - theirs).max() < FAR * theirs.std()


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_it_is_refused_by_name(exports: Path, name: str, words: str) -> None:
    assert json.loads((exports / "why.json").read_text())[name] == ""
    tiny_models.write_tokenizer(exports / name)
    expect_refusal(IR, exports / name, words)
