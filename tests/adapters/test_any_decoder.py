"""Any decoder of transformers on torch: what its own `generate` says, over our pages, with drafts and without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from adapters import registry
from adapters.contract import LoadOptions, LoraFile, LoraSlots, ModelRefused, Precision, Segment, Unsupported, silent
from adapters.decoder.short_text import read_short_text
from adapters.hf_directory import read_json
from adapters.hf_facts import DirectoryFacts, refuse_form
from adapters.invariance import find_variance
from adapters.loaded_model import LayerRange
from adapters.lora import open_lora
from adapters.model_checks import check_files
from orchestrator.protocol.commands import Submit
from orchestrator.worker.measuring.class_trial import find_insanity
from policies.sampling import Sampling
from tests.support.loops import decode, loop_over, suffix
from tests.support.model_rows import loads_models
from tests.support.tiny_decoders import (
    ARCHITECTURES,
    DECODERS,
    FORMS,
    quantise,
    write_decoder,
    write_named,
    write_named_form,
    write_seeing_decoder,
)
from tests.support.tiny_lora import write_modules

ADAPTER = registry.get("torch_device")
OPTIONS = LoadOptions(slots=8, kv_cache_bytes=16 << 20, activations=Precision.FP32, threads=1)
PROMPT = [int(token) for token in np.random.default_rng(4).integers(4, 260, 40)]
TOKENS = 24
# Those with experts, with sinks beside windows, with chunks, and with values that are shorter than keys; the others
# differ from them by what their classes compute alone.
QUICK = ("qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3")


def prepare(root: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """A tiny decoder's directory, and what the adapter made of it."""
    source, prepared = write_decoder(root / name, name, **changes), root / "prepared"
    prepared.mkdir()
    ADAPTER.prepare(source, prepared, silent)
    return source, prepared


def prepare_and_load(source: Path, prepared: Path) -> None:
    ADAPTER.prepare(source, prepared, silent)
    ADAPTER.load(prepared, OPTIONS, silent).close()


def generate(source: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers itself says behind a prompt."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = network.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return [int(token) for token in answer[0, len(prompt) :]]


@loads_models("torch_device", "safetensors", ARCHITECTURES, write_named)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DECODERS]
)
def test_a_decoder_says_what_transformers_says_with_drafts_and_without(tmp_path, name):
    """Greedy text, and the same beside others, drafted and sampled; the memory is what the head announced."""
    source, prepared = prepare(tmp_path, name)
    facts = check_files(source, adapter="torch_device")
    assert isinstance(facts, DirectoryFacts)
    assert facts.family == ARCHITECTURES[name]
    model = ADAPTER.load(prepared, OPTIONS, silent)
    assert model.spec.bytes_per_token == 4 * facts.count_kv_elements(facts.all_layers)
    assert model.spec.layers == facts.layers
    assert model.capabilities.weights == facts.stored == "fp32"
    expected = generate(source, PROMPT, TOKENS)
    assert len(set(expected)) > 1
    submits = [
        Submit(request_id="greedy", prompt=PROMPT, max_tokens=TOKENS, sampling=Sampling(0.0)),
        Submit(request_id="sampled", prompt=PROMPT[:9], max_tokens=TOKENS, sampling=Sampling(0.9, seed=3)),
        Submit(request_id="again", prompt=PROMPT * 2, max_tokens=TOKENS, sampling=Sampling(0.0)),
    ]
    plain = {submit.request_id: decode(loop_over(model, None), [submit])[0][submit.request_id] for submit in submits}
    assert plain["greedy"] == expected
    assert decode(loop_over(model, suffix()), submits)[0] == plain
    model.close()


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in DECODERS if name != "mixtral")]
)
def test_rows_keep_their_bits(tmp_path, name):
    """Experts, too: an expert is met by any number of rows, one among them. Llama 4 takes sigmoids of as many numbers
    as it has experts. torch computes what fills no vector otherwise, so that four experts need one width."""
    _, prepared = prepare(tmp_path, name)
    tiers = ADAPTER.classes(OPTIONS)
    model = ADAPTER.load(prepared, replace(OPTIONS, numerical_class=tiers[name == "llama4_text"][0]), silent)
    assert find_variance(model) == ""
    model.close()


def test_wrong_positions_would_be_seen_at_the_first_start(tmp_path):
    """The text that a class is tried with is by transformers' own attention and cache."""
    from adapters.torch_device.short_text import write_short_text

    _, prepared = prepare(tmp_path, "olmo2")
    write_short_text(prepared, tmp_path / "text.json")
    text = read_short_text(tmp_path / "text.json")
    assert text is not None
    model = ADAPTER.load(prepared, OPTIONS, silent)
    problem, agreement = find_insanity(model, text, model.forward([Segment(0, 0, [1], (0, 1))]).logits)
    assert (problem, agreement) == ("", 1.0)
    model.close()


def test_of_a_model_that_sees_the_half_that_says_tokens_is_loaded(tmp_path):
    from transformers import AutoModelForImageTextToText

    source, prepared = write_seeing_decoder(tmp_path / "m"), tmp_path / "prepared"
    prepared.mkdir()
    facts = check_files(source, adapter="torch_device")
    ADAPTER.prepare(source, prepared, silent)
    model = ADAPTER.load(prepared, OPTIONS, silent)
    assert model.spec.bytes_per_token == 4 * facts.count_kv_elements(facts.all_layers)
    whole = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = whole.eval()(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    rows = model.forward([Segment(0, 0, PROMPT, (0, len(PROMPT)))]).logits
    assert np.abs(rows - expected).max() < 1e-4
    model.close()


def lists_form(title: str, decoder: str, form: str, **options: Any) -> Callable[[Any], Any]:
    """Have docs/models.md list a quantised form that a test loads."""
    write = None if options else write_named_form
    models = {f"{decoder} {form}": ARCHITECTURES[decoder]}
    return loads_models("torch_device", f"safetensors, {title}", models, write, **options)


@lists_form("MXFP4", "gpt_oss", "mxfp4")
@lists_form("FP8", "olmo2", "fp8")
@lists_form("compressed-tensors", "olmo2", "compressed-tensors")
@lists_form("AWQ", "olmo2", "awq")
@lists_form("GPTQ", "mixtral", "gptq")
@lists_form("bitsandbytes", "olmo2", "bitsandbytes-4", needs="bitsandbytes")
@pytest.mark.parametrize(
    ("name", "form", "package"),
    [
        ("gpt_oss", "mxfp4", "torch"),
        ("olmo2", "fp8", "accelerate"),
        ("olmo2", "compressed-tensors", "compressed_tensors"),
        ("olmo2", "compressed-tensors-4", "compressed_tensors"),
        ("olmo2", "awq", "torch"),
        ("mixtral", "gptq", "torch"),
        ("olmo2", "gptq-v2-8", "torch"),
        ("olmo2", "bitsandbytes-4", "bitsandbytes"),
        ("olmo2", "bitsandbytes-8", "bitsandbytes"),
    ],
)
def test_a_quantised_checkpoint_says_what_its_weights_say_to_transformers(tmp_path, name, form, package):
    """On the processor it is widened: greedy text is that of transformers over the same weights in float32, drafts
    change none, and rows keep their bits."""
    pytest.importorskip(package)
    source = write_decoder(tmp_path / name, name, intermediate_size=128, moe_intermediate_size=64)
    before = check_files(source, adapter="torch_device")
    whole = quantise(source, form)
    facts = check_files(source, adapter="torch_device")
    assert isinstance(facts, DirectoryFacts)
    assert facts.matrix_elements == before.matrix_elements
    assert facts.held_bytes >= 2 * facts.matrix_elements
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    ADAPTER.prepare(source, prepared, silent)
    model = ADAPTER.load(prepared, OPTIONS, silent)
    assert model.capabilities.weights == f"{facts.stored}, held in fp32"
    submits = [
        Submit(request_id="greedy", prompt=PROMPT, max_tokens=TOKENS, sampling=Sampling(0.0)),
        Submit(request_id="sampled", prompt=PROMPT[:9], max_tokens=TOKENS, sampling=Sampling(0.9, seed=3)),
    ]
    plain = {submit.request_id: decode(loop_over(model, None), [submit])[0][submit.request_id] for submit in submits}
    assert plain["greedy"] == generate(whole, PROMPT, TOKENS)
    assert decode(loop_over(model, suffix()), submits)[0] == plain
    assert find_variance(model, far=False) == ""
    model.close()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"bits": 3}, r"quantization_config\.bits: gptq in 3 is not run on a processor; 2, 4, 8 is\."),
        ({"checkpoint_format": "marlin"}, r"quantization_config\.checkpoint_format: gptq in 'marlin'"),
        ({"bits": 8}, "its packed tensors do not go together"),
        ({"quant_method": "awq", "version": "gemv"}, r"quantization_config\.version: awq in 'gemv'"),
    ],
)
def test_weights_that_are_packed_otherwise_are_refused_by_the_key(tmp_path, harm, words):
    source, prepared = write_decoder(tmp_path / "m", "olmo2"), tmp_path / "prepared"
    quantise(source, "gptq")
    change(quantization_config=FORMS["gptq"] | harm)(source)
    prepared.mkdir()
    with pytest.raises(ModelRefused, match=words):
        prepare_and_load(source, prepared)


@pytest.mark.parametrize(
    ("form", "device", "missing"),
    [
        ("awq", "cuda", "gptqmodel"),
        ("gptq", "cuda", "optimum and gptqmodel"),
        ("bitsandbytes", "cpu", "bitsandbytes and accelerate"),
        ("compressed-tensors", "cpu", "compressed_tensors"),
        ("torchao", "cpu", "torchao and accelerate"),
    ],
)
def test_what_a_form_needs_on_a_device_is_named_where_it_is_missing(monkeypatch, form, device, missing):
    packages = missing.split(" and ")
    monkeypatch.setattr("adapters.hf_facts.find_spec", lambda name: None if name in packages else find_spec("numpy"))
    names = " ".join(package.replace("_", "-") for package in packages)
    with pytest.raises(ModelRefused, match=f"{form} needs {missing}, which is not installed: pip install {names}$"):
        refuse_form(form, device, "m")
    monkeypatch.setattr("adapters.hf_facts.find_spec", lambda name: find_spec("numpy"))
    refuse_form(form, device, "m")


@pytest.mark.parametrize("form", ["awq", "gptq", "mxfp4"])
def test_these_need_no_package_on_a_processor(monkeypatch, form):
    monkeypatch.setattr("adapters.hf_facts.find_spec", lambda name: None)
    refuse_form(form, "cpu", "m")


def test_a_quantised_checkpoint_of_a_built_in_family_names_the_package_that_it_needs(tmp_path, monkeypatch):
    source = write_decoder(tmp_path / "m", "llama-biased", attention_bias=False, mlp_bias=False)
    assert not isinstance(check_files(source, adapter="torch_device"), DirectoryFacts)
    quantise(source, "fp8")
    monkeypatch.setattr("adapters.hf_facts.find_spec", lambda name: None if name == "accelerate" else find_spec(name))
    with pytest.raises(ModelRefused, match=r"fp8 needs accelerate, which is not installed: pip install accelerate"):
        check_files(source, adapter="torch_device")


def change(**keys: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        config = read_json(directory / "config.json") | keys
        (directory / "config.json").write_text(json.dumps(config))

    return write


@pytest.mark.parametrize(
    ("harm", "adapter", "words"),
    [
        (change(), "openvino_rt", ["Olmo2ForCausalLM", "set adapter: torch_device"]),
        (change(), "onnx_rt", ["set adapter: torch_device"]),
        (change(layer_types=["linear_attention"] * 3), "torch_device", ["layer_types", "adapter: llama_cpp"]),
        (change(is_encoder_decoder=True), "torch_device", ["is_encoder_decoder"]),
        (change(architectures=["Olmo2ForSequenceClassification"]), "torch_device", ["no decoder"]),
        (change(num_hidden_layers="3"), "torch_device", ["num_hidden_layers"]),
        (change(max_position_embeddings=None), "torch_device", ["max_position_embeddings", "missing"]),
        (change(quantization_config={"bits": 4}), "torch_device", ["quantization_config", "quant_method"]),
        (change(quantization_config={"quant_method": "aqlm"}), "torch_device", ["aqlm", "pip install"]),
    ],
)
def test_what_is_not_run_is_refused_by_the_head(tmp_path, harm, adapter, words):
    source = write_decoder(tmp_path / "m", "olmo2")
    harm(source)
    with pytest.raises(ModelRefused) as caught:
        check_files(source, adapter=adapter)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_of_a_repository_is_never_run(tmp_path):
    """A class that only the repository has is refused; of one that the library has, its own is taken."""
    source = write_decoder(tmp_path / "m", "olmo2")
    code = "raise SystemExit('run')\n"
    (source / "modeling_tomorrow.py").write_text(code)
    change(auto_map={"AutoModelForCausalLM": "modeling_tomorrow.X", "AutoConfig": "modeling_tomorrow.C"})(source)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    ADAPTER.prepare(source, prepared, silent)
    assert not list(prepared.glob("*.py"))
    ADAPTER.load(prepared, OPTIONS, silent).close()
    change(model_type="tomorrow")(source)
    with pytest.raises(ModelRefused, match=r"no decoder for model_type 'tomorrow', and code of a model's repository"):
        ADAPTER.prepare(source, prepared, silent)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    source, prepared = prepare(tmp_path, "olmo2")
    for harm, words in (
        ({"num_hidden_layers": 4}, "it has no fit tensor model.layers.3."),
        ({"num_hidden_layers": 2}, "a tensor that the class does not know, model.layers.2."),
        ({"intermediate_size": 95}, "it has no fit tensor|cannot load it"),
    ):
        written = read_json(source / "config.json") | harm
        (prepared / "config.json").write_text(json.dumps(written))
        with pytest.raises(ModelRefused, match=words):
            ADAPTER.load(prepared, OPTIONS, silent)


def test_layers_and_ranks_are_not_cut(tmp_path):
    _, prepared = prepare(tmp_path, "olmo2")
    with pytest.raises(Unsupported, match="loaded whole"):
        ADAPTER.load_layers(prepared, OPTIONS, LayerRange(0, 2), silent)  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="loaded whole"):
        ADAPTER.load(prepared, LoadOptions(activations=Precision.FP32, tensor_parallel=2), silent)
    with pytest.raises(Unsupported, match="int8"):
        ADAPTER.prepare(tmp_path / "olmo2", prepared, silent, Precision.INT8)


def test_a_class_that_looks_ahead_or_attends_by_itself_is_refused(tmp_path):
    """Bloom has no attention interface; Mamba's state is no KV cache, which its tensors show."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    for kind, own, words in (
        ("bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM is not run over a paged KV cache"),
        (
            "mamba",
            {"num_attention_heads": 1, "state_size": 8},
            "such a layer keeps more of a text than keys and values",
        ),
    ):
        source, prepared = write_decoder(tmp_path / kind, "olmo2"), tmp_path / f"prepared-{kind}"
        from transformers import AutoConfig, AutoModelForCausalLM

        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **own}))
        network.save_pretrained(source)
        change(max_position_embeddings=512, num_attention_heads=4)(source)
        prepared.mkdir()
        with pytest.raises(ModelRefused, match=words):
            prepare_and_load(source, prepared)


def test_an_adapter_of_peft_is_added_to_a_class_of_transformers_as_it_stands(tmp_path):
    source, prepared = prepare(tmp_path, "glm4")
    tensors = load_file(source / "model.safetensors")
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    pairs = {
        name.removesuffix(".weight"): (draw(2, values.shape[1]), draw(values.shape[0], 2))
        for name, values in tensors.items()
        if name.endswith("proj.weight")
    }
    lora, merged = tmp_path / "lora", tmp_path / "merged"
    write_modules(lora, pairs, {"r": 2, "lora_alpha": 4})
    shutil.copytree(source, merged)
    added = {f"{module}.weight": 2.0 * wide @ narrow for module, (narrow, wide) in pairs.items()}
    save_file({name: values + added.get(name, 0.0) for name, values in tensors.items()}, merged / "model.safetensors")
    (tmp_path / "prepared-merged").mkdir()
    ADAPTER.prepare(merged, tmp_path / "prepared-merged", silent)
    tokens = [(7 * i + 5) % 250 for i in range(30)]
    expected = ADAPTER.load(tmp_path / "prepared-merged", OPTIONS, silent)
    rows = expected.forward([Segment(0, 0, tokens, (0, 30))]).logits.copy()
    opened = open_lora("own", str(lora), tmp_path, source, "torch_device", tmp_path)
    model = ADAPTER.load(prepared, replace(OPTIONS, loras=(opened,)), silent)
    assert isinstance(model, LoraSlots)
    model.use_lora(1, "own")
    batch = [Segment(0, 0, tokens, (0, 30)), Segment(1, 0, tokens, (0, 30))]
    both = model.forward(batch).logits.copy()
    assert np.abs(both[30:] - rows).max() < 1e-3 * np.abs(rows).max()
    assert np.abs(both[:30] - rows).max() > 0.1 * np.abs(rows).max()
    model.close()
    for module, why in (("lm_head", "adapters of lm_head are not served"), ("model.norms", "does not have")):
        write_modules(tmp_path / module, {module: pairs["model.layers.0.self_attn.q_proj"]}, {"r": 2, "lora_alpha": 4})
        wrong = LoraFile("own", str(tmp_path / module), "")
        with pytest.raises(ModelRefused, match=why):
            ADAPTER.load(prepared, replace(OPTIONS, loras=(wrong,)), silent)
