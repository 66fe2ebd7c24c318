"""What a worker must know, as plain values: they cross a process boundary. Planning makes them of a configuration."""

from __future__ import annotations

from typing import Literal

import msgspec

from adapters.contract import StaticShapes
from adapters.model_identity import ModelIdentity
from orchestrator.protocol.links.address import LinkEndpoint
from policies.sampling import ToleranceGoal
from policies.serving.slo import NO_OBJECTIVES, Objectives
from policies.speculation.pid import DEFAULTS, PidSettings
from policies.speculation.state import COLD_DEPTH


class ShardOptions(msgspec.Struct, frozen=True):
    """So many consecutive layers of a model, and where they run."""

    adapter: str
    device: str
    layers: int
    threads: int = 0
    """0: as many as the model would have."""
    own: bool = False
    """In a process of their own."""
    host: str = ""
    """Of that process; "": any."""
    cores: list[int] = []
    """Of that process; none: all."""


class LoraOptions(msgspec.Struct, frozen=True):
    """A LoRA adapter of a target; the fields are those of the configuration."""

    name: str
    source: str


class ModelOptions(msgspec.Struct, frozen=True):
    source: str
    base: str
    """The directory that a relative `source` starts from."""
    store: str
    """The directory that keeps prepared models."""
    name: str
    adapter: str
    device: str
    exactness: str
    weights: str
    activations: str
    kv_cache_precision: str
    threads: int
    kv_cache_bytes: int
    max_batch_rows: int
    static: StaticShapes = StaticShapes()
    shards: list[ShardOptions] = []
    """Its layers in order, where several devices hold them; else it is whole."""
    tensor_parallel: int = 1
    """Over so many ranks each of its layers is split."""
    device_layers: int | None = None
    """So many its device holds at most; None: all."""
    shard_endpoints: list[LinkEndpoint] = []
    """Where the shards are called that have processes of their own, in their order."""
    identity: ModelIdentity | None = None
    """The content that it is to have; None: what the source has when it is loaded."""
    drafts: bool = False
    """It is a draft: no output depends on its values."""
    loras: list[LoraOptions] = []
    """What single requests may be computed with, where its runtime applies any."""
    store_max_bytes: int = 0
    """What prepared models may take in the store; 0: no bound."""


class SuffixOptions(msgspec.Struct, frozen=True, tag_field="method", tag="suffix"):
    name: str
    max_match: int
    memory_bytes: int
    """Bounds its store of earlier outputs."""
    statistics: str = "none"
    """"auto", "none", or a file."""
    place: str = ""
    """Where the configuration names it."""
    growth: Literal["own", "shared", "none"] = "none"
    """Whom what is counted while it serves helps."""


class IndexOptions(msgspec.Struct, frozen=True, tag_field="method", tag="index"):
    name: str
    store: str
    """What the store is called."""
    path: str
    place: str
    """Where the configuration names it."""
    size_bytes: int
    most_bytes: int
    """Of one that replaces it while it is used."""


class HeadOptions(msgspec.Struct, frozen=True, tag_field="method", tag="head"):
    name: str
    place: str
    """Where the configuration names it."""
    directory: str
    prefill_ms: float
    """As in ModelDraftOptions."""


class RemoteOptions(msgspec.Struct, frozen=True):
    """A drafter in a worker of its own; the fields are those of the configuration."""

    host: str
    overlap: Literal["auto", "always", "never"]
    max_wait_ms: float
    answer_timeout_s: float
    cores: list[int] = []


class ModelDraftOptions(msgspec.Struct, frozen=True, tag_field="method", tag="model"):
    name: str
    place: str
    """Where the configuration names it."""
    model: ModelOptions
    prefill_ms: float
    """Bounds what a round spends on prompts that it has not seen yet."""
    remote: RemoteOptions | None = None
    translate: bool = False
    """It is served where its vocabulary is another one, too."""


class EndpointDraftOptions(msgspec.Struct, frozen=True, tag_field="method", tag="endpoint"):
    """A drafter on a llama-server; the fields that are not explained are those of the configuration."""

    name: str
    place: str
    """Where the configuration names it."""
    endpoint: str
    api_key_file: str
    """"": it wants none."""
    overlap: Literal["auto", "always", "never"]
    max_wait_ms: float
    answer_timeout_s: float
    tokenizer: str
    """Where its tokens are to be translated: the source of a model with its tokenizer. "": they are the target's."""


class ShardWorkerOptions(msgspec.Struct, frozen=True):
    model: ModelOptions
    """All of it, as that process has it."""
    across_hosts: bool
    """Other machines may have to reach it."""
    start: str = ""
    """Another one with every start, so that no later daemon adopts it without its target."""


class DraftWorkerOptions(msgspec.Struct, frozen=True):
    """A draft worker: its draft, and for how many sequences."""

    draft: ModelDraftOptions
    slots: int
    across_hosts: bool
    """Other machines may have to reach it."""
    memory_share: int = 1
    """As in EngineOptions."""


class EndpointOptions(msgspec.Struct, frozen=True):
    """The worker of a replica that is another engine's server."""

    model: ModelOptions
    """The target: its tokenizer alone is needed."""
    url: str
    name: str
    """What the server calls the model; "": its only one."""
    engine: str
    """"auto": it is asked."""
    key_file: str
    """Has the key; "": none is asked for."""
    exactness: str
    """As the operator declares it."""
    max_running: int


DraftOptions = SuffixOptions | IndexOptions | HeadOptions | ModelDraftOptions | EndpointDraftOptions


class CanaryOptions(msgspec.Struct, frozen=True):
    max_depth: int
    fixed_depth: bool
    drafters: list[DraftOptions] | None = None
    """None: by the same."""


class EngineOptions(msgspec.Struct, frozen=True):
    """The target's worker: its model, its limits and its drafters."""

    model: ModelOptions
    max_running: int
    max_itl_ms: float
    prefix_reuse: bool
    max_depth: int
    tolerance: ToleranceGoal
    drafters: list[DraftOptions]
    """In order of cost."""
    low_acceptance_rate: float
    objectives: Objectives = NO_OBJECTIVES
    starting_depth: float = COLD_DEPTH
    """Of every request."""
    fixed_depth: bool = False
    """As in ReadyDrafting."""
    pid: PidSettings = DEFAULTS
    canary: CanaryOptions | None = None
    across_hosts: bool = False
    """Workers on other machines may have to reach it."""
    predicted_depth: int = 0
    """As in ReadyDrafting."""
    kv_disk_bytes: int = 0
    """Beginnings of prompts may take so much on disk; 0: none are kept."""
    memory_share: int = 1
    """The KV cache and forwards are at most one part of so many, as larger ones had no memory."""

    @property
    def all_drafters(self) -> list[DraftOptions]:
        return [*self.drafters, *((self.canary.drafters or []) if self.canary is not None else [])]

    @property
    def canary_drafters(self) -> list[str]:
        """The names of the drafters that only the canary has."""
        return [draft.name for draft in self.canary.drafters or []] if self.canary is not None else []

    @property
    def canary_depth(self) -> int:
        """The most drafts that a request of the canary gets in a round: none where it has no drafter."""
        return self.canary.max_depth if self.canary is not None and self.all_drafters else 0

    @property
    def deepest(self) -> int:
        """The most drafts that any request gets in a round."""
        depths = [self.max_depth, self.canary.max_depth if self.canary is not None else 0]
        return max(*depths, self.predicted_depth if any(depths) else 0)

    def without_drafts(self) -> EngineOptions:
        return msgspec.structs.replace(self, drafters=[], canary=None, max_depth=0, predicted_depth=0)

    def with_model(self, **changes: object) -> EngineOptions:
        return msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, **changes))
