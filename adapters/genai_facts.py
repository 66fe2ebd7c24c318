"""What a directory of onnxruntime-genai says of its decoder, read without ONNX Runtime and without a byte of weights.

Its model builder writes such directories: `genai_config.json`, a graph (`model.onnx`), its weights beside it and the
tokenizer's files. Keys and values go in and come out, and attention (GroupQueryAttention) appends to them in place, so
they can be rolled back (ADR 0136). Graphs of another shape are refused here, by name.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final

from adapters.content_digest import full_identity
from adapters.contract import ModelRefused
from adapters.decoder.spec import MOST_COUNT
from adapters.ir_facts import IrFacts, explain_whole
from adapters.protobuf import read_fields, read_numbers, read_text

GENAI_CONFIG: Final = "genai_config.json"
GENAI_WEIGHTS_SUFFIX: Final = ".data"
GENAI_ADAPTER: Final = "onnx_rt"
"""The only runtime of ours that runs them."""
PADDING_ROWS: Final = 16
"""Positions at the end of the context that are kept free: a forward is filled up by 15 rows at most (ADR 0040), and the
graph knows the angles of its own context alone."""
_FORM: Final = "onnxruntime-genai's form"
_ATTENTION: Final = "GroupQueryAttention"
_PRODUCTS: Final = ("MatMul", "MatMulNBits")
_EXPERTS: Final = ("MoE", "QMoE")
# A graph with its weights beside it has some hundred bytes a node. Bounds what is read of a file that is no such graph.
_MOST_GRAPH_BYTES: Final = 256 << 20
_FLOAT: Final = 1
"""Of ONNX's types (TensorProto.DataType)."""
_REBUILD: Final = "Build it again for CPUs: python -m onnxruntime_genai.models.builder -e cpu -p int4"
_TAKE_SOURCE: Final = "Take the model that it was made from: its GGUF file or safetensors."


@dataclass(frozen=True, slots=True, kw_only=True)
class GenaiFacts(IrFacts):
    """A decoder as its graph and genai_config.json describe it. `graph` and `data`: the names of its files."""

    adapter: ClassVar[str] = GENAI_ADAPTER
    form: ClassVar[str] = _FORM
    whole: ClassVar[str] = explain_whole(_FORM)

    kv_heads: int
    head_dim: int
    graph: str
    data: str


@dataclass(slots=True)
class Node:
    """An operation of a graph: what it is, what it reads and gives, and its whole-numbered attributes."""

    kind: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Graph:
    """What is kept of a graph: its operations, the type of each input, the shapes of stored tensors by their names, and
    the files that hold them ("" for the graph's own)."""

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    files: Counter[str] = field(default_factory=Counter)


def read_genai_facts(directory: Path, where: str) -> GenaiFacts:
    """Return the facts of a directory. `where`: what messages call it.

    Raises ModelRefused where a file is damaged or missing, or the graph is none whose cache can be rolled back."""
    if not (directory / GENAI_CONFIG).is_file():
        raise ModelRefused(f"{where}: it is in onnxruntime-genai's form. Download it, and name the directory's path.")
    config = _Config(directory / GENAI_CONFIG, f"{where}/{GENAI_CONFIG}")
    path = directory / config.graph
    try:
        if path.stat().st_size > _MOST_GRAPH_BYTES:
            raise ModelRefused(f"{where}/{path.name}: its weights are not in a file beside it. {_REBUILD}")
        graph = _read_graph(path, tuple(full_identity(path)))
        if why := _find_fault(graph, config):
            raise ModelRefused(f"{where}/{path.name}: {why}")
        return _describe(graph, config)
    except OSError as error:
        raise ModelRefused(f"{where}/{path.name}: cannot be read ({error.strerror or error})") from error
    except (ValueError, IndexError, KeyError) as error:
        raise ModelRefused(f"{where}/{path.name}: it is no whole graph ({error}). Fetch it again.") from error


class _Config:
    """What is used of genai_config.json. Raises ModelRefused, by the key, where something is not as it should be."""

    def __init__(self, path: Path, where: str) -> None:
        self._where = where
        try:
            model = json.loads(path.read_bytes())["model"]
            decoder = model["decoder"]
            self.family = str(model["type"])
            self.graph = str(decoder["filename"])
            self.inputs: Mapping[str, str] = {key: str(name) for key, name in decoder["inputs"].items()}
            self.outputs: Mapping[str, str] = {key: str(name) for key, name in decoder["outputs"].items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ModelRefused(f"{where}: {error!r}: it describes no decoder. {_TAKE_SOURCE}") from error
        if Path(self.graph).name != self.graph:
            raise ModelRefused(f"{where}: filename: {self.graph[:60]!r} is no file beside it. {_REBUILD}")
        self.context = self._count(model, "context_length")
        self.vocabulary = self._count(model, "vocab_size")
        self.layers = self._count(decoder, "num_hidden_layers")
        self.hidden = self._count(decoder, "hidden_size")
        self.heads = self._count(decoder, "num_attention_heads")
        self.kv_heads = self._count(decoder, "num_key_value_heads")
        self.head_dim = self._count(decoder, "head_size")

    def _count(self, values: Mapping[str, Any], key: str) -> int:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_COUNT:
            raise ModelRefused(f"{self._where}: {key}: {value!r} is no whole number above 0. Mend the file.")
        return value

    def list_inputs(self) -> set[str]:
        """Return the inputs that a graph of it may have: ids, the mask, and each layer's keys and values."""
        names = {self.inputs.get("input_ids", ""), self.inputs.get("attention_mask", "")}
        return names | {name for layer in range(self.layers) for name in name_caches(self.inputs, "past", layer)}


def name_caches(names: Mapping[str, str], prefix: str, layer: int) -> tuple[str, str]:
    """Return what a graph calls a layer's keys and values; `prefix` is past or present."""
    keys, values = (names.get(f"{prefix}_{kind}_names", "") for kind in ("key", "value"))
    return keys.replace("%d", str(layer)), values.replace("%d", str(layer))


@lru_cache(maxsize=8)  # a start asks several times
def _read_graph(path: Path, identity: tuple[int, ...]) -> Graph:
    """Read a graph (onnx.proto). Raises OSError, and ValueError or IndexError for what is none."""
    del identity  # of the key alone
    graph = Graph()
    for number, model in read_fields(memoryview(path.read_bytes())):
        if number != 7 or isinstance(model, int):
            continue
        for part, value in read_fields(model):
            if isinstance(value, int):
                continue
            if part == 1:
                graph.nodes.append(_read_node(value))
            elif part == 5:
                _read_tensor(graph, value)
            elif part == 11:
                name, kind = _read_input(value)
                graph.inputs[name] = kind
    return graph


def _read_node(data: memoryview) -> Node:
    node = Node()
    for number, value in read_fields(data):
        if number == 1:
            node.inputs.append(read_text(value))
        elif number == 2:
            node.outputs.append(read_text(value))
        elif number == 4:
            node.kind = read_text(value)
        elif number == 5 and not isinstance(value, int):
            attribute = dict(read_fields(value))
            if isinstance(whole := attribute.get(3), int):
                node.numbers[read_text(attribute[1])] = whole
    return node


def _read_tensor(graph: Graph, data: memoryview) -> None:
    dims: list[int] = []
    name, file = "", ""
    for number, value in read_fields(data):
        if number == 1:
            dims += read_numbers(value)
        elif number == 8:
            name = read_text(value)
        elif number == 13 and not isinstance(value, int):
            entry = {key: read_text(text) for key, text in read_fields(value)}
            file = entry.get(2, "") if entry.get(1) == "location" else file
    graph.tensors[name] = tuple(dims)
    graph.files[file] += math.prod(dims)


def _read_input(data: memoryview) -> tuple[str, int]:
    """Return an input's name, and the type of its elements (0: it is no tensor)."""
    fields = dict(read_fields(data))
    kind = fields.get(2)
    tensor = dict(read_fields(kind)).get(1) if isinstance(kind, memoryview) else None
    element = dict(read_fields(tensor)).get(1, 0) if isinstance(tensor, memoryview) else 0
    return read_text(fields.get(1, memoryview(b""))), element if isinstance(element, int) else 0


def find_head(nodes: Sequence[Node], logits: str) -> Node | None:
    """Return the product that gives the logits; None where they come of something else."""
    head = next((node for node in nodes if logits in node.outputs), None)
    return head if head is not None and head.kind in _PRODUCTS else None


def _find_fault(graph: Graph, config: _Config) -> str:
    """Return why a graph cannot be served, with the way out; "" where it can."""
    attentions = [node for node in graph.nodes if node.kind == _ATTENTION]
    logits = config.outputs.get("logits", "")
    if len(attentions) != config.layers:
        return f"it has {len(attentions)} nodes of {_ATTENTION} for {config.layers} layers. {_REBUILD}"
    if len({tuple(node.inputs[5:7]) for node in attentions}) != 1 or any(len(node.inputs) < 7 for node in attentions):
        return f"its layers do not share the lengths that {_ATTENTION} reads. {_TAKE_SOURCE}"
    if other := sorted(graph.inputs.keys() - config.list_inputs()):
        return f"it reads {other[0]}, which this runtime does not give it. {_TAKE_SOURCE}"
    if missing := sorted(config.list_inputs() - graph.inputs.keys()):
        return f"it does not read {missing[0]!r}, which {GENAI_CONFIG} names. {_REBUILD}"
    if any(graph.inputs[name] != _FLOAT for name in name_caches(config.inputs, "past", 0)):
        return f"its keys and values are not in float32, so it was made for another device. {_REBUILD}"
    if experts := next((node.kind for node in graph.nodes if node.kind in _EXPERTS), ""):
        return f"it has experts ({experts}), whose weights are not counted here. {_TAKE_SOURCE}"
    if find_head(graph.nodes, logits) is None:
        return f"its logits ({logits!r}) are not what a product gives. {_TAKE_SOURCE}"
    files = [file for file in graph.files if file]
    if len(files) != 1 or Path(files[0]).name != files[0] or not files[0].endswith(GENAI_WEIGHTS_SUFFIX):
        return f"its weights are not in one file beside it (*{GENAI_WEIGHTS_SUFFIX}). {_REBUILD}"
    return "" if config.context > PADDING_ROWS else f"a context of {config.context} tokens has no room. {_TAKE_SOURCE}"


def _describe(graph: Graph, config: _Config) -> GenaiFacts:
    head = find_head(graph.nodes, config.outputs["logits"])
    sizes: defaultdict[str, int] = defaultdict(int)
    head_elements, widest = 0, config.hidden
    for node in graph.nodes:
        if node.kind not in _PRODUCTS:
            continue
        bits, shape = 32, graph.tensors.get(node.inputs[1], ())
        if node.kind == "MatMulNBits":
            bits, shape = node.numbers.get("bits", 4), (node.numbers["K"], node.numbers["N"])
        sizes[f"int{bits}" if bits < 32 else "fp32"] += math.prod(shape) if shape else 0
        if node is head:
            head_elements = math.prod(shape)
        elif shape:
            widest = max(widest, math.prod(shape) // config.hidden)
    embedding = config.vocabulary * config.hidden
    return GenaiFacts(
        family=config.family,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        mlp=widest,
        vocabulary_size=config.vocabulary,
        context_length=config.context - PADDING_ROWS,
        kv_elements=2 * config.layers * config.kv_heads * config.head_dim,
        attention_elements=config.layers * config.heads * config.head_dim,
        layer_elements=sum(sizes.values()) - head_elements,
        layer_reads=sum(sizes.values()) - head_elements,
        embedding_elements=embedding,
        head_elements=head_elements,
        stored=max(sizes, key=lambda name: sizes[name]),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        graph=config.graph,
        data=next(file for file in graph.files if file),
    )
