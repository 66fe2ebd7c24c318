"""The section `model`: the target, how it runs, and where its replicas do."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from adapters.names import normalise_device
from adapters.output_form import OutputForm
from device_profiles.profile import Exactness
from orchestrator.config.adapter_names import AUTO as AUTO
from orchestrator.config.adapter_names import AdapterName, DeviceName, RuntimeName, ShardingName
from orchestrator.config.drafts import Draft
from orchestrator.config.model_keys import (
    MAX_REPLICAS,
    ActivationPrecision,
    Cores,
    DeviceLayers,
    KvCachePrecision,
    StaticShapesSection,
    WeightsPrecision,
)
from orchestrator.config.section import Section, Size
from policies.serving.residency import Keep

EngineName = Literal["auto", "vllm", "sglang", "llama_server", "trtllm", "ollama", "ovms", "tgi", "generic"]
"""`generic`: any with OpenAI's completions, of which nothing more is known."""
OutputFormat = Literal["auto", OutputForm]
ENDPOINT_KEYS: Final = frozenset({"model", "api_key_file", "engine"})
"""Keys of a replica that go with `endpoint`."""
SPLITTING_KEYS: Final = frozenset({"shards", "tensor_parallel"})
"""Keys that put one worker's target on several devices."""


class Placement(Section):
    """Where one replica of the target runs."""

    host: str = ""
    """On Ray: the address of the node that it runs on; `here`: the daemon's. Empty: any."""
    cores: Cores = Field(default=[])
    """The CPU cores that it runs on, by their numbers on its host. Empty: `devices.cores`."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of its runtime; 0 is one for each of its `cores`, and `devices.threads` where it has none."""


class OwnTarget(Placement):
    """A worker of the target with a place and settings of its own. What is not set is as in `model`, `devices` and
    `limits`."""

    adapter: RuntimeName | None = None
    """The runtime that runs it."""
    device: DeviceName | None = None
    """The device, as the runtime names it."""
    exactness: Annotated[Exactness, Field(strict=False)] | None = None
    """As `model.exactness`."""
    weights: WeightsPrecision | None = None
    """The number format of the weights."""
    activations: ActivationPrecision | None = None
    """The number format of activations."""
    kv_cache_precision: KvCachePrecision | None = None
    """The number format of the KV cache."""
    kv_cache: Size | None = None
    """Memory of its KV cache: less is a shorter context and fewer requests at a time."""
    max_running: int | None = Field(default=None, ge=1, le=1024)
    """Sequences that it decodes at the same time."""
    max_batch_rows: int | None = Field(default=None, ge=16, le=8192)
    """Rows of one forward."""

    @property
    def is_endpoint(self) -> bool:
        """Return whether another engine's server computes for it."""
        return False

    @property
    def own_drafts(self) -> tuple[Draft, ...] | None:
        """Return its own drafters, None where it has those of the target."""
        return None

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it has a runtime or a device of its own."""
        return self.adapter is not None or self.device is not None

    @property
    def own_model(self) -> dict[str, Any]:
        """Return what it has of its own of the keys of `model` that decide how it computes."""
        names = ("adapter", "device", "exactness", "weights", "activations", "kv_cache_precision")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class TargetShard(Section):
    """Consecutive layers of the target on one device."""

    layers: int = Field(ge=1, le=10_000)
    """How many; the first shard has the first layers."""
    adapter: ShardingName = ""
    """The runtime that runs them. Empty: `model.adapter`."""
    device: DeviceName = ""
    """The device, as the runtime names it. Empty: `model.device`."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of its runtime; 0 is one for each of its `cores`, and as many as the target would have where it has
    none."""
    host: str = ""
    """On Ray: the address of the node that it runs on, in a process of its own; `here`: the daemon's. Empty: where the
    target's worker is."""
    cores: Cores = Field(default=[])
    """The CPU cores that it runs on, in a process of its own, by their numbers on its host. Empty: those that the
    target's worker has."""

    @property
    def in_own_process(self) -> bool:
        """Return whether a process of its own runs it: one has its own host or cores."""
        return bool(self.host or self.cores)


class ReplicaTarget(OwnTarget):
    """An item of `model.replicas`: a worker that computes, or another engine's server that it asks."""

    drafts: tuple[Draft, ...] | None = Field(default=None, max_length=4, strict=False)
    """Its own drafters, written as `drafts`. An empty list is plain decoding. Left out: as `drafts`."""
    shards: list[TargetShard] | None = Field(default=None, max_length=64)
    """Its layers on several devices, written as `model.shards`. An empty list: all on its device."""
    tensor_parallel: int | None = Field(default=None, ge=1, le=64)
    """Over how many ranks each of its layers is split, as `model.tensor_parallel`."""
    endpoint: str = ""
    """The address of another engine's server, which serves this model: any with OpenAI's completions. Empty: the worker
    computes by itself."""
    model: str = Field(default="", max_length=256)
    """What that server calls the model. Empty: it has one only."""
    api_key_file: str = ""
    """A file with the server's key (relative to this configuration file); other users must not be able to read it.
    Empty: none is sent."""
    engine: EngineName = "auto"
    """Which engine it is. `auto`: it is asked."""

    @property
    def is_endpoint(self) -> bool:
        return bool(self.endpoint)

    @property
    def own_drafts(self) -> tuple[Draft, ...] | None:
        return self.drafts

    @property
    def own_model(self) -> dict[str, Any]:
        split = {name: value for name in sorted(SPLITTING_KEYS) if (value := getattr(self, name)) is not None}
        return super().own_model | split


class ReplicaBounds(Section):
    """How many replicas there are, where that follows load."""

    min: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Replicas that are always there, and that the daemon starts with."""
    max: int = Field(ge=1, le=MAX_REPLICAS)
    """The most; there is one more where requests wait, or nearly do, and there is a place for it."""
    idle_s: float = Field(default=120.0, gt=0, le=86_400)
    """How long a replica beyond `min` must not have been needed before it is ended."""
    places: list[OwnTarget] = Field(default=[], max_length=MAX_REPLICAS)
    """Where they run, the first ones first: one for each of `max`. Empty: a plan chooses where there is one, else as
    many run as `devices.threads` leave cores for, and on a Ray cluster one on each host."""


def _kind_of_replicas(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return PLACED
    if isinstance(value, (dict, ReplicaBounds)):
        return BOUNDED
    return PLANNED if value == AUTO else COUNTED


COUNTED, PLACED, BOUNDED = "a number of replicas", "a list of replicas", "bounds of replicas"
PLANNED = "as many replicas as a plan has"
"""What `model.replicas` is, as pydantic's places name it."""

Replicas = Annotated[
    Annotated[int, Field(ge=1, le=MAX_REPLICAS), Tag(COUNTED)]
    | Annotated[list[ReplicaTarget], Field(min_length=1, max_length=MAX_REPLICAS), Tag(PLACED)]
    | Annotated[ReplicaBounds, Tag(BOUNDED)]
    | Annotated[Literal["auto"], Tag(PLANNED)],
    Discriminator(_kind_of_replicas),
]


class LoraAdapter(Section):
    """A LoRA adapter of the target: small matrices that a request may have added to the target's."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """What requests call it, behind the model's name: `model: MODEL:NAME`."""
    source: str = Field(min_length=1)
    """Where it is (relative to this configuration file): a GGUF file, as llama.cpp's converter of adapters writes it,
    or a directory of PEFT with `adapter_config.json` and `adapter_model.safetensors`."""


class Target(StaticShapesSection):
    """The target model: what is served, and on which runtime it runs."""

    source: str = Field(min_length=1)
    """Where the weights are. `package:NAME/FILE` is a file inside an installed Python package. A path leads to a GGUF
    file or to a Hugging Face directory (relative to this configuration file). `hf:ORG/NAME`, `hf:ORG/NAME@REVISION` or
    `hf:ORG/NAME/FILE.gguf` is a model of the Hugging Face hub. Of a split GGUF model it is the first file.
    `simulated:toy` has no weights."""
    name: str = Field(default="", max_length=128)
    """The model's name in the API. Empty: taken from the source."""
    adapter: AdapterName = "openvino_rt"
    """The runtime that runs it. `auto`: the plan chooses among those that are installed (`placement`)."""
    device: DeviceName = "CPU"
    """The device, as the runtime names it, in any case. `auto`: the plan chooses."""
    exactness: Annotated[Exactness, Field(strict=False)] = Exactness.BIT
    """`bit`: output is identical to the last bit whatever shares the batch. `kernel`: faster with many sequences,
    and the last bits may depend on the batch."""
    weights: WeightsPrecision = "auto"
    """The number format of the weights. `as_file` keeps the values that the source has. `fast` rounds the offsets of
    4-bit formats that have them (Q4_1, Q4_K), which saves memory and time and costs quality; else it is `as_file`.
    `auto` chooses by device: int8 for NPUs, bf16 or fp16 for GPUs, on CPUs what `outrider models quality` measured
    fastest, and `as_file` until it did."""
    activations: ActivationPrecision = "auto"
    """The number format of activations. `auto` takes the fastest numerical class that was measured to keep its bits."""
    kv_cache_precision: KvCachePrecision = "auto"
    """The number format of the KV cache. `8bit` holds 1.8 times the tokens. `openvino_rt` alone has it, and under
    `exactness: bit` it runs where rows were measured to keep their bits."""
    replicas: Replicas = 1
    """How many workers serve it: a number, a list that says where and how each runs, or bounds between which it follows
    load. `auto`: as many as the plan finds worth it, each on a device of its own. Each has a KV cache of
    `limits.kv_cache` and decodes `limits.max_running` sequences, where it has none of its own."""
    adapters: list[LoraAdapter] = Field(default=[], max_length=64)
    """LoRA adapters that requests may name behind the model's name, each on its own (`llama_cpp`, `torch_device`).
    Drafts stay those of the model. Requests that name one go to the replicas that apply it."""
    keep: Keep = "always"
    """When it is in memory. `always`: from the start to the end. `while_used`: from the start, until it rests for
    `idle_s` or another model needs its room. `on_demand`: from the first request that asks for it, until then. Requests
    wait while their model is loaded."""
    idle_s: float = Field(default=600.0, gt=0, le=604_800)
    """How long a model that need not stay is kept without a request."""
    output_format: OutputFormat = "auto"
    """In which form it writes thoughts and tool calls. `auto`: the one that its chat template shows."""
    alike: bool = False
    """Whether all replicas must have equal bits. One that has others takes no request then. Else they form groups of
    equal bits, and a request stays with the group that began it (`failover.other_bits`)."""
    shards: list[TargetShard] = Field(default=[], max_length=64)
    """The target's layers on several devices, in order, where no device is to hold them all. Empty: on one device, or
    as a plan chooses (`placement.sharding`)."""
    device_layers: DeviceLayers = "all"
    """How many layers a GPU holds at most (`llama_cpp`, as its `-ngl` counts: from the last on, and the output head is
    one). The host's memory has the rest. Where the GPU has no room for so many, it holds fewer."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Over how many ranks each layer is split, on one host (`torch_device`). On the CPU ranks share the threads. On
    CUDA they have one device each, from `device` on (`CUDA` is `CUDA:0`)."""

    @property
    def bounds(self) -> ReplicaBounds | None:
        """Return between which numbers of replicas load decides, None where it does not."""
        return self.replicas if isinstance(self.replicas, ReplicaBounds) else None

    @property
    def placements(self) -> list[OwnTarget]:
        """Return where each replica runs, at the start where load decides; one where the plan decides."""
        if isinstance(self.replicas, str):
            return [OwnTarget()]
        if isinstance(self.replicas, ReplicaBounds):
            return (self.replicas.places or [OwnTarget()] * self.replicas.min)[: self.replicas.min]
        return [*self.replicas] if isinstance(self.replicas, list) else [OwnTarget()] * self.replicas

    @property
    def most_replicas(self) -> int:
        """Return how many replicas there may be at a time."""
        if isinstance(self.replicas, str):
            return MAX_REPLICAS
        return self.replicas.max if isinstance(self.replicas, ReplicaBounds) else len(self.placements)

    @property
    def unlike(self) -> bool:
        """Return whether its replicas are written to compute in different ways."""
        placements = self.placements
        ways = [placement.own_model for placement in placements]
        endpoints = any(placement.is_endpoint for placement in placements)
        return endpoints or any(way != ways[0] for way in ways)

    def with_own(self, own: OwnTarget) -> Target:
        """Return the target as one worker of it runs. One on another runtime or device is a whole target, where it does
        not say otherwise."""
        mine = own.own_model
        whole: dict[str, Any] = {"device_layers": "all"} if own.is_elsewhere else {}
        if own.is_elsewhere or mine.keys() & SPLITTING_KEYS:  # one of the two ways to split takes the other's place
            whole |= {"shards": [], "tensor_parallel": 1}
        model = self.model_copy(update=whole | mine)
        return model.model_copy(update={"device": normalise_device(model.adapter, model.device)})

    def place(self, placements: list[OwnTarget]) -> Replicas:
        """Return `replicas` as they are where as many run as these, in these places."""
        if isinstance(self.replicas, ReplicaBounds):
            return self.replicas.model_copy(update={"min": len(placements), "places": placements})
        own = [(placement.model_fields_set, dict(placement)) for placement in placements]
        return [ReplicaTarget.model_construct(names, **values) for names, values in own]
