"""Models as far as planning goes: their sizes, and the number formats to choose from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from adapters.decoder.draft_outputs import count_draft_bytes
from adapters.decoder.source import count_held_bytes, open_source
from adapters.decoder.spec import DecoderSizes, DecoderSpec
from adapters.gguf_splits import read_model_header
from adapters.hf_facts import DirectoryFacts
from adapters.model_checks import list_only_runtimes
from adapters.model_digests import digest_at_hand, parse_simulated_script
from adapters.model_source import check_model, resolve
from adapters.simulated.script import Script
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.profile import DRAFT, FAST, Precision
from device_profiles.workload import DecoderShape
from orchestrator.config.sketch import Shape, SketchedModel
from policies.models.quantization import AS_FILE, AUTO, BITS_PER_WEIGHT
from policies.planning.plan import ModelFacts

_TOY = DecoderShape.dense(1, 8, 1, 1, 8, 8, 272)  # nobody reads more of the simulated model than its layer
HIDDEN_BYTES = 2  # of an element of what crosses from one layer shard to the next
_FILE_BITS = 16.0  # of a weight of a model that is not there and is to be taken as its file has it


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to place. `weights`: the number formats to choose from, empty where the device decides. `file_bits`: of
    a weight as the model's file has it. `digest` of its files, "" where they are not there. `runtimes`: which alone run
    it, empty for all. `own_format`: AS_FILE, or DRAFT for a draft that gets a copy. `whole`: its layers are not cut.
    `splits`: over how many ranks each layer may be split in equal parts."""

    name: str
    shape: DecoderShape
    weights: tuple[str, ...] = ()
    file_bits: float = _FILE_BITS
    digest: str = ""
    runtimes: tuple[str, ...] = ()
    own_format: str = AS_FILE
    whole: bool = False
    splits: tuple[int, ...] = ()

    @property
    def facts(self) -> ModelFacts:
        shape = self.shape
        return ModelFacts(self.name, shape.layers, float(HIDDEN_BYTES * shape.hidden))

    def bits(self, weights: str) -> float:
        return self.file_bits if weights in (AS_FILE, FAST, DRAFT) else BITS_PER_WEIGHT[Precision(weights)]

    def formats(self, kind: str) -> tuple[str, ...]:
        """Return the formats to choose from on a device of that kind; where none was named, what
        policies/models/quantization.py takes for one of which nothing was measured."""
        unnamed = {"gpu": (Precision.BF16.value,), "npu": (Precision.INT8.value,)}
        return self.weights or unnamed.get(kind, (self.own_format,))


def build_sketched_model(sketched: SketchedModel) -> PlannedModel:
    """Return a model that is known by its shape."""
    splits = list_splits(sketched.shape.kv_heads)
    return PlannedModel(sketched.name, shape_of(sketched.shape), tuple(sketched.weights), splits=splits)


def list_splits(kv_heads: int) -> tuple[int, ...]:
    """Return the numbers of ranks that share so many key heads evenly: the largest part would set the pace."""
    return tuple(ranks for ranks in range(2, kv_heads + 1) if kv_heads % ranks == 0)


def shape_of(shape: Shape) -> DecoderShape:
    return DecoderShape.dense(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        mlp=shape.mlp,
        vocabulary=shape.vocabulary,
        tied_embeddings=shape.tied_embeddings,
    )


def model_at_hand(
    source: str,
    name: str,
    base: Path,
    weights: str,
    store: Path | None = None,
    *,
    adapter: str = "",
    drafts: bool = False,
) -> PlannedModel:
    """Return a model whose files are there, or can be downloaded; `weights` and `adapter` as cluster.yaml has them.
    `store` remembers digests; without one none is made, which takes a second for each GB. `drafts`: it is a draft,
    which is taken as small as a copy of its own can be.

    Raises ModelRefused or DownloadFailed.
    """
    digest = digest_at_hand(source, base, store, adapter) if store is not None else ""
    if source.startswith(SIMULATED_PREFIX):
        layers = Script.parse(parse_simulated_script(source)).layers
        return PlannedModel(name or "simulated-toy", replace(_TOY, layers=layers), digest=digest)
    file = resolve(source, base, adapter=adapter)
    sizes = check_model(file, adapter)
    size = sizes.held_bytes if isinstance(sizes, DirectoryFacts) else file.weights_bytes
    if isinstance(sizes, DecoderSpec) and weights != FAST:
        size = count_held_bytes(open_source(file.path)) or size
    own_format = AS_FILE
    if drafts and weights in (AUTO, DRAFT) and not file.path.is_dir():
        draft_bytes = count_draft_bytes(read_model_header(file.path))
        if draft_bytes < size:
            size, own_format = draft_bytes, DRAFT
    formats = (AS_FILE,) if sizes.fixed_formats else () if weights == AUTO else (weights,)
    shape, runtimes = _shape_of_sizes(sizes), list_only_runtimes(sizes)
    bits = 8.0 * size / shape.elements
    splits = list_splits(sizes.kv_heads) if isinstance(sizes, DecoderSpec) else ()
    named = name or file.name
    return PlannedModel(named, shape, formats, bits, digest, runtimes, own_format, bool(sizes.whole), splits)


def _shape_of_sizes(sizes: DecoderSizes) -> DecoderShape:
    in_layers = sizes.count_layer_elements(sizes.all_layers)
    return DecoderShape(
        layers=sizes.layers,
        hidden=sizes.hidden,
        mlp=sizes.mlp,
        vocabulary=sizes.outputs,
        layer_elements=in_layers // sizes.layers,
        end_elements=sizes.matrix_elements - in_layers,
        read_elements=sizes.read_elements,
        kv_elements=sizes.count_kv_elements(sizes.all_layers),
        attention_elements=sizes.attention_elements,
    )
