"""A file's head says of a decoder what llama.cpp's library finds when it loads it, and what none serves is named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters import model_checks
from adapters.contract import LayerRange, LoadOptions, ModelRefused, silent
from adapters.decoder.facts import Memory
from adapters.decoder.gguf_spec import read_gguf_spec
from adapters.decoder.spec import DecoderSpec
from adapters.gguf_facts import GgufFacts, read_facts
from adapters.gguf_header import read_header
from adapters.libllama import VARIABLE
from adapters.model_checks import check_files
from adapters.model_source import check_source, refuse_runtime, resolve
from adapters.names import CONVERTING_ADAPTERS
from adapters.registry import get
from device_profiles.profile import DeviceProfile
from orchestrator.config.load import load_text
from orchestrator.errors import ConfigError
from orchestrator.fitting.precision import sizes_of
from orchestrator.planning.models import model_at_hand
from orchestrator.worker.loading.memory import predict_memory
from orchestrator.worker.loading.numerical_classes import ClassQuestion, _short_text
from tests.support.tiny_gguf import Tiny, write
from tests.support.tiny_llama_files import ARCHITECTURES, TOKENS, write_llama_file

CACHE, HYBRID, RECURRENT = Memory.KV_CACHE, Memory.HYBRID, Memory.RECURRENT
# Bytes a position (float16) and of a text's state (float32), as `llama_state_seq_get_size` of ik_llama.cpp and of
# xllamacpp's llama.cpp had them for these files, without what tells positions and sequences.
MEMORIES: dict[str, tuple[Memory, int, int]] = {
    **dict.fromkeys(("qwen3moe", "mixtral", "gpt-oss", "phi3", "glm4", "starcoder2", "olmo2"), (CACHE, 256, 0)),
    **dict.fromkeys(("granite", "seed_oss", "glm4moe"), (CACHE, 256, 0)),
    "smollm3": (CACHE, 512, 0),
    "gemma2": (CACHE, 3328, 0),
    "gemma3": (CACHE, 768, 0),
    "gemma4": (CACHE, 384, 0),
    "llama4": (CACHE, 512, 0),
    "deepseek2": (CACHE, 2304, 0),
    "lfm2": (HYBRID, 128, 512),
    **dict.fromkeys(("qwen35", "qwen35moe"), (HYBRID, 128, 137216)),
    "qwen3next": (HYBRID, 128, 411648),
    "mamba": (RECURRENT, 0, 19456),
}
OURS = [Tiny("llama"), Tiny("qwen2", bias=True, tied=True), Tiny("qwen3", qk_norm=True, heads=6, kv_heads=3, layers=3)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_file(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture
def lfm2(tmp_path: Path) -> Path:
    return write_llama_file(tmp_path, "lfm2")


def facts_of(path: Path) -> GgufFacts:
    return read_facts(read_header(path))


def test_what_a_model_remembers_is_what_the_library_keeps(file: Path) -> None:
    name, facts = file.stem.removeprefix("tiny-"), facts_of(file)
    memory, position_bytes, state_bytes = MEMORIES[name]
    assert facts.memory is memory
    assert facts.cuts_anywhere == (memory is CACHE)
    assert 2 * facts.count_kv_elements(facts.all_layers) == position_bytes
    assert facts.state_bytes == state_bytes


def test_sizes_are_those_of_the_tensors(file: Path) -> None:
    facts, reader = facts_of(file), gguf.GGUFReader(str(file))
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    assert facts.matrix_elements == sum(math.prod(map(int, tensor.shape)) for tensor in matrices)
    assert facts.weights_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert (facts.vocabulary_size, facts.hidden, facts.context_length) == (len(TOKENS), 64, 2048)
    assert len(facts.layer_elements) == facts.layers == int(reader.fields[f"{facts.family}.block_count"].contents())
    assert facts.stored == "Q8_0"
    embedding = len(TOKENS) * facts.hidden
    assert sum(facts.layer_elements) + facts.embedding_elements + facts.head_elements == facts.matrix_elements
    assert facts.head_elements in (0, embedding)
    assert facts.embedding_elements >= embedding


@pytest.mark.parametrize(("experts", "used"), [(4, 2), (4, 4), (8, 1)])
def test_a_row_meets_the_experts_that_are_used(tmp_path: Path, experts: int, used: int) -> None:
    facts = facts_of(write_llama_file(tmp_path, "qwen3moe", experts=experts, experts_used=used))
    expert = 3 * 64 * 64
    assert [of - reads for of, reads in zip(facts.layer_elements, facts.layer_reads, strict=True)] == [
        (experts - used) * expert
    ] * 2


@pytest.mark.parametrize("tiny", OURS, ids=lambda tiny: tiny.family)
@given(st.data())
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_readers_agree_on_what_both_read(tmp_path: Path, tiny: Tiny, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write(path, tiny)
    spec, facts = read_gguf_spec(read_header(path)), facts_of(path)
    alike = ("family", "layers", "hidden", "heads", "mlp", "vocabulary_size", "context_length", "matrix_elements")
    for name in (*alike, "read_elements", "attention_elements", "outputs", "draft_outputs"):
        assert getattr(facts, name) == getattr(spec, name), name
    first = data.draw(st.integers(0, tiny.layers - 1))
    layers = LayerRange(first, data.draw(st.integers(first + 1, tiny.layers)))
    assert facts.count_elements(layers) == spec.count_elements(layers)
    assert facts.count_layer_elements(layers) == spec.count_layer_elements(layers)
    assert facts.count_kv_elements(layers) == spec.count_kv_elements(layers)


def test_a_file_is_called_by_what_most_of_it_is(tmp_path: Path) -> None:
    kinds = gguf.GGMLQuantizationType
    path = write_llama_file(tmp_path, "gpt-oss", kind=kinds.BF16, expert_kind=kinds.MXFP4, experts=8)
    assert facts_of(path).stored == "MXFP4"


def test_layers_that_only_draft_are_no_layers_of_the_model(tmp_path: Path) -> None:
    whole = facts_of(write_llama_file(tmp_path, "glm4", layers=2))
    drafting = facts_of(write_llama_file(tmp_path, "glm4", layers=3, metadata={"nextn_predict_layers": 1}))
    assert (drafting.layers, drafting.matrix_elements) == (whole.layers, whole.matrix_elements)
    assert drafting.count_kv_elements(drafting.all_layers) == whole.count_kv_elements(whole.all_layers)


def test_heads_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    path = write_llama_file(tmp_path, "qwen3moe", layers=3, metadata={"attention.head_count_kv": [2, 0, 1]})
    facts = facts_of(path)
    assert facts.kv_heads == (2, 0, 1)
    assert facts.key_lengths == (16, 0, 16)
    assert facts.count_kv_elements(LayerRange(1, 3)) == 2 * 16


def test_yarn_extends_the_context_as_for_our_own_graphs(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}
    assert facts_of(write_llama_file(tmp_path, "qwen3moe", metadata=scaling)).context_length == 4096


ODD_VALUES: list[tuple[str, Any, str]] = [
    ("block_count", 0, "whole number from 1"),
    ("block_count", None, "lacks a positive"),
    ("context_length", None, "lacks a positive"),
    ("attention.head_count_kv", [2], "a number for each of 2 layers"),
    ("attention.head_count", "x", "whole number"),
    ("rope.scaling.type", 7, "is not a text"),
    ("nextn_predict_layers", 2, "all of its layers draft"),
    ("nextn_predict_layers", 3, "to at most 2"),
]


@pytest.mark.parametrize(("key", "value", "reason"), ODD_VALUES)
def test_damaged_numbers_are_refused_by_their_key(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    path = write_llama_file(tmp_path, "qwen3moe", metadata={key: value})
    with pytest.raises(ModelRefused, match=rf"tiny-qwen3moe\.gguf: .*qwen3moe\.{key}.*{reason}|{reason}.*{key}"):
        facts_of(path)


@given(st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_head_is_refused_and_never_more(file: Path, tmp_path: Path, data: st.DataObject) -> None:
    header = read_header(file)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header.data_offset - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    with suppress(ModelRefused):  # any other exception fails the test
        check_files(path, adapter="llama_cpp")


UNSERVED = {
    "bert": "embeddings",
    "gemma-embedding": "embeddings",
    "t5encoder": "embeddings",
    "t5": "encoder before it writes",
    "llada": "passes over the whole",
    "eagle3": "draft head",
    "gemma4-assistant": "draft head",
    "wavtokenizer-dec": "sound",
    "clip": "sees pictures",
}


@pytest.mark.parametrize("adapter", ["llama_cpp", "openvino_rt", "auto"])
@pytest.mark.parametrize("family", UNSERVED)
def test_what_is_no_decoder_of_text_is_refused_by_its_name(tmp_path: Path, family: str, adapter: str) -> None:
    write(tmp_path / "m.gguf", Tiny(family))
    with pytest.raises(
        ModelRefused, match=f"m.gguf: general.architecture: '{family}': .*{UNSERVED[family]}"
    ) as refusal:
        check_files(tmp_path / "m.gguf", adapter=adapter)
    assert "set adapter" not in str(refusal.value)


def test_an_unknown_encoder_is_told_by_what_it_computes(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Tiny("newbert"), {"attention.causal": False})
    with pytest.raises(ModelRefused, match=r"newbert\.attention\.causal: it makes embeddings"):
        check_files(tmp_path / "m.gguf", adapter="llama_cpp")


def test_an_architecture_of_tomorrow_is_left_to_the_library(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Tiny("tomorrow", words=("a", "b", "c", "ab"), vocabulary=4))
    assert check_files(tmp_path / "m.gguf", adapter="llama_cpp").family == "tomorrow"


class Devices:
    """Stands in for the registry where llama.cpp's library is or is not installed."""

    def __init__(self, found: list[DeviceProfile]) -> None:
        self.found = found

    def list_devices(self, name: str) -> list[DeviceProfile]:
        assert name == "llama_cpp"
        return self.found


@pytest.fixture
def own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not known for faults."""
    monkeypatch.setenv(VARIABLE, __file__)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, own_library: None) -> Iterator[None]:
    monkeypatch.setattr(model_checks, "registry", Devices(get("simulated").devices()))
    model_checks._read_head.cache_clear()
    yield
    model_checks._read_head.cache_clear()


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "registry", Devices([]))
    model_checks._read_head.cache_clear()


@pytest.mark.usefixtures("own_library")
def test_llama_cpp_takes_what_no_graph_here_computes(file: Path) -> None:
    facts = check_source(str(file), Path(), "llama_cpp")
    assert isinstance(facts, GgufFacts)
    assert facts == facts_of(file)


@pytest.mark.usefixtures("installed")
def test_a_plan_may_choose_llama_cpp_where_it_is(lfm2: Path) -> None:
    assert isinstance(check_source(str(lfm2), Path(), "auto"), GgufFacts)


@pytest.mark.usefixtures("missing")
def test_other_hosts_may_have_llama_cpp_where_this_one_has_not(lfm2: Path) -> None:
    assert isinstance(check_source(str(lfm2), Path(), ""), GgufFacts)


WAY_OUT = "llama.cpp's library runs it as it is: set adapter: llama_cpp."


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("adapter", ["auto", "openvino_rt", "torch_device", "onnx_rt"])
def test_others_refuse_it_and_name_the_way_out(lfm2: Path, adapter: str) -> None:
    with pytest.raises(ModelRefused, match=r"tiny-lfm2\.gguf: general\.architecture: 'lfm2' is not one of") as refusal:
        check_source(str(lfm2), Path(), adapter)
    assert str(refusal.value).endswith(WAY_OUT)


@pytest.mark.usefixtures("installed")
def test_a_named_adapter_refuses_it_wherever_llama_cpp_is(lfm2: Path) -> None:
    with pytest.raises(ModelRefused, match="set adapter: llama_cpp"):
        check_source(str(lfm2), Path(), "openvino_rt")


@pytest.mark.usefixtures("own_library")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"expert_count": 4, "expert_used_count": 2}, "expert_count"),
        ({"logit_scale": 8.0}, "logit_scale"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"attention.value_length": 16}, "heads that differ in size"),
    ],
)
def test_what_our_graphs_leave_out_of_a_known_architecture_is_left_to_llama_cpp(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    write(tmp_path / "m.gguf", Tiny("llama", words=("a", "b", "c", "ab"), vocabulary=4), changes)
    with pytest.raises(ModelRefused, match=f"{why}.*set adapter: llama_cpp"):
        check_files(tmp_path / "m.gguf", adapter="onnx_rt")
    assert check_files(tmp_path / "m.gguf", adapter="llama_cpp").layers == 2


@pytest.mark.parametrize(
    ("metadata", "extra"),
    [({}, {"blk.1.attn_k.weight": None}), ({"context_length": None}, {}), ({"general.type": "adapter"}, {})],
)
def test_damage_stays_damage(tmp_path: Path, metadata: dict[str, Any], extra: dict[str, None]) -> None:
    write(tmp_path / "m.gguf", Tiny("llama"), metadata, extra)
    with pytest.raises(ModelRefused) as refusal:
        check_files(tmp_path / "m.gguf", adapter="openvino_rt")
    assert "llama_cpp" not in str(refusal.value)


def test_our_own_tokenizer_decides_for_llama_cpp_too(tmp_path: Path) -> None:
    path = write_llama_file(tmp_path, "qwen3moe", metadata={"tokenizer.ggml.pre": "of-tomorrow"})
    with pytest.raises(ModelRefused, match=r"'of-tomorrow' \(tokenizer\.ggml\.pre\), which is none of"):
        check_source(str(path), Path(), "llama_cpp")


def test_config_check_names_the_line_and_the_way_out(lfm2: Path) -> None:
    text = f"model:\n  source: {lfm2.name}\n  adapter: openvino_rt\ndrafts: []\n"
    with pytest.raises(
        ConfigError, match=r"cluster\.yaml:2: model\.source: .*'lfm2' is not one of.*set adapter: llama"
    ):
        load_text(text, lfm2.parent / "cluster.yaml")


@pytest.mark.usefixtures("own_library")
def test_config_check_takes_it_for_llama_cpp(lfm2: Path) -> None:
    text = f"model:\n  source: {lfm2.name}\n  adapter: llama_cpp\ndrafts: []\n"
    assert load_text(text, lfm2.parent / "cluster.yaml").model.adapter == "llama_cpp"


def test_a_plan_takes_its_sizes_and_leaves_the_other_runtimes_out(tmp_path: Path) -> None:
    path = write_llama_file(tmp_path, "qwen3moe")
    planned = model_at_hand(str(path), "", Path(), "auto", tmp_path / "store", adapter="llama_cpp")
    facts = facts_of(path)
    assert planned.runtimes == ("llama_cpp",)
    shape = planned.shape
    assert (shape.layers, shape.kv_elements, shape.read_elements) == (2, 128, facts.read_elements)
    assert abs(shape.elements - facts.matrix_elements) < facts.layers
    assert planned.bits("as_file") == pytest.approx(8 * path.stat().st_size / shape.elements)
    sizes = sizes_of(resolve(str(path), Path()), get("llama_cpp"))
    assert (sizes.parameters, sizes.held_bytes, sizes.stored) == (facts.matrix_elements, path.stat().st_size, "Q8_0")


@pytest.mark.usefixtures("installed")
def test_which_runtimes_run_a_model_is_told(lfm2: Path, tmp_path: Path) -> None:
    write(tmp_path / "ours.gguf", Tiny("qwen2", words=("a", "b", "c", "ab"), vocabulary=4))
    for adapter in ("llama_cpp", *CONVERTING_ADAPTERS):
        refuse_runtime("ours.gguf", tmp_path, adapter)
    refuse_runtime(str(lfm2), Path(), "llama_cpp")
    for adapter in CONVERTING_ADAPTERS:
        with pytest.raises(ModelRefused, match="set adapter: llama_cpp"):
            refuse_runtime(str(lfm2), Path(), adapter)


def test_no_reference_is_asked_for_what_it_does_not_compute(lfm2: Path, tmp_path: Path) -> None:
    options = LoadOptions(device="CPU", kv_cache_bytes=1 << 20, slots=1)
    question = ClassQuestion(
        *(get("simulated"), tmp_path / "weights", options, "mark", "m", "digest", "weights", 1),
        file=lfm2,
        store=tmp_path,
        isolated=False,
    )
    assert _short_text(question, silent) is None


@pytest.mark.parametrize("architecture", ["qwen3moe", "deepseek2", "mamba"])
def test_memory_is_planned_for_every_kind(tmp_path: Path, architecture: str) -> None:
    path = write_llama_file(tmp_path, architecture)
    options = LoadOptions(device="CPU", kv_cache_bytes=1 << 20, slots=1)
    plan = predict_memory(options, get("openvino_rt"), facts_of(path), path.parent, logits_rows=4)
    assert plan is not None
    assert plan.weights >= path.stat().st_size // 2
    assert plan.kv_cache >= 1 << 20


@pytest.mark.model
def test_the_default_model_is_the_same_to_both(default_model_path: Path) -> None:
    ours, theirs = check_files(default_model_path), check_files(default_model_path, adapter="llama_cpp")
    assert isinstance(ours, DecoderSpec)
    assert isinstance(theirs, GgufFacts)
    assert (theirs.memory, theirs.layers, theirs.context_length) == (CACHE, ours.layers, ours.context_length)
    assert theirs.matrix_elements == ours.matrix_elements
    assert theirs.count_kv_elements(theirs.all_layers) == ours.count_kv_elements(ours.all_layers)
