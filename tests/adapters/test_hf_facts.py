"""What a directory's heads say of a decoder that transformers runs: sizes as ours, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from adapters.contract import LayerRange, ModelRefused
from adapters.decoder.facts import DecoderFacts
from adapters.decoder.hf_config import read_spec
from adapters.hf_facts import read_directory_facts
from adapters.safetensors_file import Stored
from tests.support import tiny_models

ODD_VALUES = ["x", -1, 0, 10**400, 1e300, math.nan, math.inf, True, [], {}, [1], {"a": 1}, "1.0", None]
KEYS = (
    *(
        "architectures",
        "layer_types",
        "sliding_window",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "text_config",
    ),
    *("num_experts", "num_experts_per_tok", "quantization_config", "is_encoder_decoder", "multi_query", "n_layer"),
    *("use_bidirectional_attention", "moe_intermediate_size"),
)


def list_tensors(config: dict[str, Any], experts: int = 0) -> dict[str, Stored]:
    """The heads of a tiny model's tensors, in bf16; `experts`: its MLPs are so many experts, each as large."""
    shapes = {name: values.shape for name, values in tiny_models.tensors_of(config).items()}
    if experts:
        for name in [name for name in shapes if ".mlp." in name]:
            shapes[name.replace(".mlp.", ".mlp.experts.")] = (experts, *shapes.pop(name))
    return {name: Stored(name, Path("m.safetensors"), "BF16", shape, 0) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", [name for name in tiny_models.CONFIGS if name != "gemma2-uncapped"])
def test_sizes_are_those_of_our_own_graphs(name):
    config = tiny_models.config_of(name)
    _, spec = read_spec(config, "m")
    facts = read_directory_facts(config, list_tensors(config), "m")
    assert (facts.layers, facts.hidden, facts.heads, facts.mlp) == (spec.layers, spec.hidden, spec.heads, spec.mlp)
    assert (facts.vocabulary_size, facts.context_length) == (spec.vocabulary_size, spec.context_length)
    assert facts.matrix_elements == spec.matrix_elements
    assert facts.read_elements == spec.read_elements
    assert facts.attention_elements == spec.attention_elements
    for layers in (LayerRange(0, 4), LayerRange(0, 1), LayerRange(2, 4)):
        assert facts.count_kv_elements(layers) == spec.count_kv_elements(layers)
        assert facts.count_elements(layers) == spec.count_elements(layers)
    assert facts.weights_bytes == facts.held_bytes
    assert facts.stored == "bf16"
    assert facts.cuts_anywhere


def test_a_row_meets_the_experts_that_it_is_routed_to():
    config = tiny_models.config_of("qwen3", architectures=["Qwen3MoeForCausalLM"])
    dense = read_directory_facts(config, list_tensors(config), "m")
    routed = config | {"num_experts": 8, "num_experts_per_tok": 2}
    facts = read_directory_facts(routed, list_tensors(config, experts=8), "m")
    mlp = 3 * facts.mlp * facts.hidden
    assert facts.layer_elements[0] == dense.layer_elements[0] + 7 * mlp
    assert facts.layer_reads[0] == dense.layer_reads[0] + mlp


@pytest.mark.parametrize("name", ["model.layers.1.mamba.in_proj.weight", "model.layers.0.linear_attn.A_log"])
def test_a_state_that_is_no_kv_cache_is_refused_by_its_tensor(name):
    config = tiny_models.config_of("qwen3", architectures=["TomorrowForCausalLM"])
    tensors = list_tensors(config) | {name: Stored(name, Path("m.safetensors"), "BF16", (4, 4), 0)}
    with pytest.raises(ModelRefused, match=rf"{name}: such a layer keeps more .* adapter: llama_cpp"):
        read_directory_facts(config, tensors, "m")


def test_of_a_longrope_the_length_is_served_up_to_which_a_row_follows_from_its_text_alone():
    scaling = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config = tiny_models.config_of("qwen3", architectures=["Phi3ForCausalLM"], rope_scaling=scaling)
    for original, context in ((128, 128), (None, 512), (1024, 512)):
        facts = read_directory_facts(config | {"original_max_position_embeddings": original}, list_tensors(config), "m")
        assert facts.context_length == context


def test_no_value_of_a_key_is_more_than_refused():
    config = tiny_models.config_of("qwen3", architectures=["TomorrowForCausalLM"])
    tensors, refused = list_tensors(config), 0
    for key in (*config, *KEYS):
        for value in ODD_VALUES:
            facts = read_or_refuse(config | {key: value}, tensors)
            if isinstance(facts, str):
                refused += 1
                assert facts.startswith("m: ")
            else:
                assert facts.read_elements > 0
    assert refused > 100


def read_or_refuse(config: dict[str, Any], tensors: dict[str, Stored]) -> DecoderFacts | str:
    try:
        return read_directory_facts(config, tensors, "m")
    except ModelRefused as error:
        return str(error)
