"""What a worker says of itself once it serves. All of it is effective, not configured, state.

`rename` keeps the names that `outrider status --json` has for the fields: there they are in one object.
"""

from __future__ import annotations

import msgspec

from adapters.model_identity import ModelIdentity

ENDPOINT = "endpoint"
"""What stands for the adapter of a worker that another engine's server computes for. Its device is the address."""


class ReadyModel(msgspec.Struct, frozen=True, rename={"name": "model", "digest": "model_digest"}):
    name: str
    vocabulary_size: int
    vocabulary_fingerprint: str
    context_tokens: int
    """The longest sequence, prompt and output together."""
    digest: str = ""
    """Of the model's files."""
    source: str = ""
    """Of a model of the Hugging Face hub it ends in its commit."""
    loras: list[str] = []
    """The LoRA adapters that requests may name."""
    identities: list[ModelIdentity] = []
    """The content of each model that it has loaded, the target's first."""

    @property
    def identity(self) -> ModelIdentity | None:
        """The content of the target's model; None for the simulated one."""
        return next((identity for identity in self.identities if identity.digest == self.digest), None)


class ReadyDevice(
    msgspec.Struct,
    frozen=True,
    rename={"name": "device", "full_name": "device_name", "layers": "device_layers", "layer_memory": "device_memory"},
):
    """What computes, and what is planned of its memory. Of several devices it is said together (see ReadyShards)."""

    adapter: str
    name: str
    """As its runtime addresses it ("GPU.0")."""
    full_name: str
    cores: list[int] = []
    static_widths: list[int] = []
    """Where shapes are static: the rows of the forwards that there are graphs for."""
    planned_memory_bytes: int = 0
    """What the worker was announced to hold at its peak before it loaded; 0: its costs on this device are not known."""
    planned_memory: dict[str, int] = {}
    """Its parts, in bytes."""
    memory_reduced: list[str] = []
    """Larger KV caches and forwards that the device had no memory for."""
    layers: str = ""
    """Where layers may be in the host's memory: how many the device has, and why."""
    layer_memory: dict[str, int] = {}
    """What was planned of the device for them, by part, in bytes; `planned_memory` has it too where the device's memory
    is the host's."""


class ReadyPrecision(
    msgspec.Struct, frozen=True, rename={"reason": "precision_reason", "rejected": "precision_rejected"}
):
    """The number formats, and how rows are computed in them."""

    weights: str
    activations: str
    kv_cache: str
    exactness: str
    row_invariant: bool
    reason: str = ""
    """Why the number formats are what they are."""
    rejected: list[str] = []
    """What else was possible and why not ("int8: not measured on this device")."""
    numerical_class: str = ""
    class_fingerprint: str = ""
    """Of the bits of the class: the same where replicas are interchangeable."""
    class_reason: str = ""
    classes_rejected: list[str] = []
    """Why not the other classes."""


class ReadyDrafting(msgspec.Struct, frozen=True):
    """Who drafts, and how many tokens a request gets in a round."""

    drafters: list[str] = []
    """Of whoever is not the canary's."""
    max_depth: int = 0
    predicted_depth: int = 0
    """The most drafts of a request with a prediction, where that is more than `max_depth` and depths are not fixed."""
    starting_depth: float = 0.0
    """What requests begin at."""
    fixed_depth: bool = False
    """Requests that say nothing get up to `max_depth` drafts in every round, as many as are proposed."""
    costs_from: str = ""
    """What the depth policy knew of rounds before the first."""
    branches: str = ""
    """Whether other ways of a draft are verified beside it, and why."""
    no_drafts: str = ""
    """Why nothing can be drafted for this model, "" where it can."""
    canary_drafters: list[str] = []
    """Those that only the canary has."""
    canary_depth: int = 0
    """The most drafts that one of the canary's requests gets in a round."""
    canary_fixed: bool = False
    """As `fixed_depth`, for the canary's."""

    @property
    def all_drafters(self) -> list[str]:
        return [*self.drafters, *self.canary_drafters]


class ReadyKv(
    msgspec.Struct, frozen=True, rename={"blocks": "kv_blocks", "format": "kv_format", "page_bytes": "kv_page_bytes"}
):
    blocks: int
    block_tokens: int
    """Positions of a block, and of a page."""
    format: str = ""
    """The same where pages mean the same; "": they cannot be moved."""
    page_bytes: int = 0

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens


class ReadyShards(
    msgspec.Struct,
    frozen=True,
    rename={"layers": "shards", "pids": "part_pids", "planned_bytes": "part_planned_bytes"},
):
    """Where several devices hold the target: which has what."""

    layers: list[str] = []
    """Which layers are where, a line for each range."""
    split: str = ""
    """Over what each layer is split, "" where it is not."""
    pids: list[int] = []
    """Of the processes beside the worker's own that hold some."""
    planned_bytes: list[int] = []
    """As `planned_memory_bytes`, of each of these."""


class ExpectedRounds(msgspec.Struct, frozen=True):
    """What rounds without drafts will take by the costs of the profile."""

    alone_ms: float
    """With one sequence."""
    full_ms: float
    """With all places taken."""
    prefill_row_ms: float
    """A row of a prompt."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    model: ReadyModel
    device: ReadyDevice
    precision: ReadyPrecision
    kv: ReadyKv
    slots: int
    """How many sequences it decodes at a time."""
    pid: int
    load_s: float
    drafting: ReadyDrafting = ReadyDrafting()
    shards: ReadyShards = ReadyShards()
    host: str = ""
    """As in DraftReady."""
    expected_rounds: ExpectedRounds | None = None
    """None where costs are not known."""
    cannot: list[str] = []
    """What a request may ask for and this worker does not do, by the names of `protocol.abilities`."""
