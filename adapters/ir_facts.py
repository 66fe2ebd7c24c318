"""What the graph of an OpenVINO IR directory says of its decoder, read without OpenVINO and without a byte of weights.

optimum-intel writes such directories (`openvino_model.xml`), and openvino_genai where it saves what it made of a GGUF
file. The graph is stateful: it keeps keys and values itself, in variables that OpenVINO's paged attention replaces
(sdpa_to_paged_attention in OpenVINO's sources). What that cannot replace is refused here, by name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final
from xml.etree import ElementTree

from adapters.content_digest import full_identity
from adapters.contract import LayerRange, ModelRefused
from adapters.decoder.facts import FileFacts
from adapters.decoder.spec import MOST_COUNT
from device_profiles.units import MIB

IR_FILE: Final = "openvino_model.xml"
IR_WEIGHTS: Final = "openvino_model.bin"
IR_ADAPTER: Final = "openvino_rt"
"""The only runtime of ours that reads them."""
# What is prepared of one is links and a page of facts. Bounds nothing else.
_LINK_BYTES: Final = 1 * MIB
_IR_FORM: Final = "OpenVINO's form (IR)"


def explain_whole(form: str) -> str:
    """Return why the layers of a model that brings its own graph are not cut, and the way out."""
    return f"it is in {form}, whose layers are not cut: leave shards out, or take the model's GGUF file or safetensors."


IR_IS_WHOLE: Final = explain_whole(_IR_FORM)
_INPUTS: Final = frozenset({"input_ids", "attention_mask", "position_ids", "beam_idx"})
_LOGITS: Final = "logits"
_PAST: Final = "past_key_values"
# In tokens, where there is no config.json, as openvino_genai writes none: it cuts prompts there (gguf_tokenizer.cpp).
_UNNAMED_CONTEXT: Final = 8192
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "n_ctx")
"""How config.json calls the context's length, by family."""
_EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_USED_KEYS: Final = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
_NAMES: Final = {
    **dict.fromkeys(("u4", "i4"), "int4"),
    **dict.fromkeys(("u8", "i8"), "int8"),
    **dict.fromkeys(("f8e4m3", "f8e5m2"), "fp8"),
    "u2": "int2",
    "nf4": "nf4",
    "f4e2m1": "mxfp4",
    "f16": "fp16",
    "bf16": "bf16",
    "f32": "fp32",
}
"""How people call OpenVINO's types of weights."""
_DYNAMIC: Final = "?"
_EXPORT: Final = "optimum-cli export openvino --task text-generation-with-past --model ORG/NAME DIRECTORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class IrFacts(FileFacts):
    """A decoder as its graph describes it.

    `kv_elements`: of keys and values that all layers keep of a position. `layer_elements`: weights of all layers'
    matrices; `layer_reads`: those that one row meets, fewer where there are experts. `adapter`: the only runtime of
    ours that runs the graph. `form`: what messages call its files'."""

    adapter: ClassVar[str] = IR_ADAPTER
    form: ClassVar[str] = _IR_FORM
    whole: ClassVar[str] = IR_IS_WHOLE
    fixed_formats: ClassVar[bool] = True
    linked_bytes: ClassVar[int | None] = _LINK_BYTES

    kv_elements: int
    attention_elements: int
    layer_elements: int
    layer_reads: int

    @property
    def read_elements(self) -> int:
        """How many weights a forward of one row reads."""
        return self.layer_reads + self.vocabulary_size * self.hidden

    def count_layer_elements(self, layers: LayerRange) -> int:
        return self.layer_elements * (layers.end - layers.first) // self.layers

    def count_kv_elements(self, layers: LayerRange) -> int:
        return self.kv_elements * (layers.end - layers.first) // self.layers


@dataclass(slots=True)
class _Graph:
    """What is kept of a graph: its inputs, each variable's name and shape ("?" where it is open), the matrices' types
    and shapes by their places in the file, heads and their elements of each attention, and the shape of each output by
    its name."""

    inputs: set[str] = field(default_factory=set)
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    matrices: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    attentions: list[tuple[int, int]] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)


def read_ir_facts(directory: Path, config: Mapping[str, Any], where: str) -> IrFacts:
    """Return the facts of a directory, of which `config` is the config.json ({} where it has none). `where`: what
    messages call it.

    Raises ModelRefused where the graph is damaged, is no decoder of text, or cannot be made paged.
    """
    path = directory / IR_FILE
    try:
        graph = _read_graph(path, tuple(full_identity(path)))
    except OSError as error:
        raise ModelRefused(f"{where}/{IR_FILE}: cannot be read ({error.strerror or error})") from error
    except (ElementTree.ParseError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ModelRefused(f"{where}/{IR_FILE}: it is no whole graph ({error}). Fetch it again.") from error
    if why := _find_fault(graph):
        raise ModelRefused(f"{where}/{IR_FILE}: {why}")
    return _describe(graph, _Config(config, where), where)


@lru_cache(maxsize=8)  # a start asks several times, and a graph of 30 layers takes a quarter of a second
def _read_graph(path: Path, identity: tuple[int, ...]) -> _Graph:
    """Read the layers of a graph one by one. Raises OSError, ElementTree.ParseError, and ValueError, KeyError,
    AttributeError or IndexError for what is no IR."""
    del identity  # of the key alone
    graph = _Graph()
    readers = {
        "Parameter": _read_input,
        "ReadValue": _read_variable,
        "Const": _read_constant,
        "ScaledDotProductAttention": _read_attention,
        "Result": _read_output,
    }
    for _, layer in ElementTree.iterparse(path):  # noqa: S314  # expat bounds what entities grow to
        if layer.tag == "layer":
            if reader := readers.get(layer.get("type", "")):
                reader(graph, layer)
            layer.clear()
    return graph


def _read_input(graph: _Graph, layer: Any) -> None:
    port = layer.find("output/port")
    graph.inputs.update((port.get("names") or layer.get("name")).split(","))


def _read_variable(graph: _Graph, layer: Any) -> None:
    data = layer.find("data")
    graph.variables[data.get("variable_id")] = tuple(_split_shape(data.get("variable_shape")))


def _read_constant(graph: _Graph, layer: Any) -> None:
    """Keep a constant that is a matrix: scales and zeros of groups have a last dimension of 1, norms have one."""
    data = layer.find("data")
    shape = tuple(int(size) for size in _split_shape(data.get("shape")))
    kind = data.get("element_type")
    if kind in _NAMES and len(shape) > 1 and shape[-1] > 1 and sum(size > 1 for size in shape) > 1:
        graph.matrices[data.get("offset")] = kind, shape


def _read_attention(graph: _Graph, layer: Any) -> None:
    query = _read_port(layer)
    graph.attentions.append((query[1], query[3]))


def _read_output(graph: _Graph, layer: Any) -> None:
    for name in (layer.get("output_names") or layer.get("name")).split(","):
        graph.outputs[name] = _read_port(layer)


def _read_port(layer: Any) -> tuple[int, ...]:
    return tuple(int(dim.text) for dim in layer.find("input/port").findall("dim"))


def _split_shape(shape: str) -> Iterator[str]:
    return (size.strip() for size in shape.split(",") if size.strip())


def _find_fault(graph: _Graph) -> str:
    """Return why a graph cannot be served, with the way out; "" where it can."""
    if "input_ids" not in graph.inputs:
        return "it reads no token ids (input_ids): it is a part of a model, or none of text. Choose another model."
    if _LOGITS not in graph.outputs or graph.outputs[_LOGITS][-1] < 1:
        return f"it has no output {_LOGITS} over a vocabulary: it is no decoder of text. Choose another model."
    states = [name for name, shape in graph.variables.items() if not _is_kv(shape)]
    if states:
        return (
            f"it remembers a text in a state ({states[0]}), which cannot be made paged. "
            "Run the model's GGUF file with adapter: llama_cpp."
        )
    past = sorted(name for name in graph.inputs if name.startswith(_PAST))
    if past or not graph.variables:
        kept = f"keys and values come from outside ({past[0]})" if past else "it keeps no keys and values"
        return f"{kept}, and only stateful graphs are made paged. Export it again: {_EXPORT}"
    if other := sorted(graph.inputs - _INPUTS):
        return f"it reads {other[0]}, which this runtime does not give it. Choose another model."
    if not graph.attentions:
        return f"it has no ScaledDotProductAttention that could be made paged. Export it again: {_EXPORT}"
    return ""


def _is_kv(shape: Sequence[str]) -> bool:
    """Return whether a variable grows with the text: (sequences, key heads, positions, elements)."""
    open_axes = [size == _DYNAMIC for size in shape]
    return open_axes == [True, False, True, False]


class _Config:
    """Numbers of a config.json, which a model that also sees pictures has in a part of it."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        inner = values.get("text_config")
        self._values = {**values, **(inner if isinstance(inner, Mapping) else {})}
        self._where = where

    def find_count(self, keys: Collection[str], default: int) -> int:
        """Return the first of these that is there. Raises ModelRefused, by the key, where it is no count."""
        key = next((key for key in keys if self._values.get(key) is not None), None)
        value = default if key is None else self._values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
            raise ModelRefused(f"{self._where}/config.json: {key}: {value!r} is no whole number. Mend the file.")
        return value

    @property
    def is_there(self) -> bool:
        return bool(self._values)

    @property
    def family(self) -> str:
        value = self._values.get("model_type")
        return value if isinstance(value, str) else "openvino_ir"


def _describe(graph: _Graph, config: _Config, where: str) -> IrFacts:
    vocabulary = graph.outputs[_LOGITS][-1]
    sizes = [(kind, shape, math.prod(shape)) for kind, shape in graph.matrices.values()]
    ends = [size for _, shape, size in sizes if vocabulary in shape]
    inside = [(shape, size) for _, shape, size in sizes if vocabulary not in shape]
    context = config.find_count(_CONTEXT_KEYS, 0 if config.is_there else _UNNAMED_CONTEXT)
    if not ends or not inside or not context:
        what = "config.json names no max_position_embeddings" if ends and inside else f"{IR_FILE} has no weights"
        raise ModelRefused(f"{where}: {what}. Copy config.json of the model that it was made from into it.")
    experts, used = config.find_count(_EXPERT_KEYS, 0), config.find_count(_USED_KEYS, 0)
    routed = sum(size for shape, size in inside if experts > 1 and shape[0] == experts and len(shape) > 2)
    elements = sum(size for _, size in inside)
    kv_elements = sum(int(shape[1]) * int(shape[3]) for shape in graph.variables.values())
    hidden = ends[0] // vocabulary
    return IrFacts(
        family=config.family,
        layers=len(graph.attentions),
        hidden=hidden,
        heads=max(heads for heads, _ in graph.attentions),
        mlp=config.find_count(("intermediate_size",), 0) or max(size // hidden for _, size in inside),
        vocabulary_size=vocabulary,
        context_length=context,
        kv_elements=kv_elements,
        attention_elements=sum(heads * length for heads, length in graph.attentions),
        layer_elements=elements,
        layer_reads=elements - routed + (routed * used // experts if routed else 0),
        embedding_elements=ends[0],
        head_elements=sum(ends[1:]),
        stored=_name_largest(sizes),
    )


def _name_largest(sizes: Sequence[tuple[str, tuple[int, ...], int]]) -> str:
    """Return how people call the type of most weights."""
    totals: defaultdict[str, int] = defaultdict(int)
    for kind, _, size in sizes:
        totals[kind] += size
    kind = max(totals, key=lambda kind: totals[kind])
    return f"{_NAMES[kind]} ({kind})"
