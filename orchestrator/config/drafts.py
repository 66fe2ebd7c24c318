"""The section `drafts`: each kind of drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Discriminator, Field, Tag, field_validator

from orchestrator.config.adapter_names import AdapterName, DeviceName
from orchestrator.config.draft_store import MEMORY, DraftStoreOptions
from orchestrator.config.model_keys import (
    MAX_REPLICAS,
    ActivationPrecision,
    Cores,
    DeviceLayers,
    DraftWeightsPrecision,
    KvCachePrecision,
    StaticShapesSection,
)
from orchestrator.config.section import Section, Size, is_http_url


class SuffixDraft(Section):
    """A drafter that continues the longest match in the request's own text and in earlier outputs."""

    method: Literal["suffix"]
    """The kind of drafter."""
    max_match: int = Field(default=16, ge=1, le=32)
    """The longest context that is matched, in tokens."""
    memory: Size = Field(default=ByteSize(64 * 1024 * 1024))
    """Memory for earlier outputs; the oldest are forgotten first. `0 B` keeps none."""
    statistics: str = Field(default="auto", min_length=1, max_length=4096)
    """What the model says most often, as `outrider drafts build` counted it, merged with the text's own word. `auto`:
    those kept in the model store, or else those that ship for this model; none where there are none. `none`. Or
    the file's path (relative to this configuration file), on every host that has a worker of the target."""
    statistics_growth: Literal["own", "shared", "none"] = "own"
    """Whether a model without statistics is counted while it serves, for the time from the next start on. `own`: what
    is counted of answers to one API key helps that key alone. `shared`: it helps all. `none`: nothing is counted, as
    with `statistics: none`."""
    store: str = MEMORY
    """Where answers are kept for other replicas and later daemons, too. `memory`: nowhere. `disk`: a file in the state
    directory; `disk:PATH`: this file (relative to this configuration file). `redis://HOST:PORT/DB`, `rediss://` with
    TLS, or `unix:///SOCKET?db=DB`: a Redis or Valkey, which daemons may share. No password may stand in it."""
    store_options: DraftStoreOptions = DraftStoreOptions()
    """How the store is used."""


class IndexDraft(Section):
    """A drafter that continues passages of documents, from a store that `outrider drafts index` made."""

    method: Literal["index"]
    """The kind of drafter."""
    path: str = Field(min_length=1, max_length=4096)
    """The store's file (relative to this configuration file), on every host that has a worker of the target. Its name
    without the ending is the store's, which requests may name."""
    memory: Size = Field(default=ByteSize(1024 * 1024 * 1024))
    """The most memory that the store may take. It is mapped, and the workers of a host share it. A larger one is
    refused."""

    @property
    def store(self) -> str:
        """What requests call the store."""
        return Path(self.path).stem


class HeadDraft(Section):
    """A drafter that reads the hidden states of its target: an EAGLE-3 head, which was trained for that one model."""

    method: Literal["head"]
    """The kind of drafter."""
    source: str = Field(min_length=1, max_length=4096)
    """The head's directory (relative to this configuration file), with `config.json` and `model.safetensors`, on every
    host that has a worker of the target. It runs in that worker, on the target's device."""


class DraftWorkersSection(Section):
    """How many workers of a draft there are (`process: own`). Each drafts for any number of replicas."""

    min: int = Field(default=0, ge=0, le=MAX_REPLICAS)
    """Workers that are always there. 0: one for each replica."""
    max: int = Field(default=0, ge=0, le=MAX_REPLICAS)
    """The most; there is one more where replicas get shorter drafts because they share one. 0: `min`."""
    idle_s: float = Field(default=60.0, gt=0, le=86_400)
    """How long a worker beyond `min` must not have been needed before it is ended."""


_EACH_ITS_OWN = DraftWorkersSection()


class ModelDraft(StaticShapesSection):
    """A drafter that is a model: any that the runtimes load."""

    method: Literal["model"]
    """The kind of drafter."""
    source: str = Field(min_length=1)
    """Where the weights are: written as `model.source`."""
    adapter: AdapterName = "openvino_rt"
    """The runtime that runs it. `auto`: the plan chooses among those that are installed (`placement`)."""
    device: DeviceName = "CPU"
    """The device, as the runtime names it. `auto`: the plan chooses."""
    weights: DraftWeightsPrecision = "auto"
    """The number format of the weights: as `model.weights`, or `draft`: 4 bits, and an output layer of the tokens that
    are said most. `auto` takes that where the runtime has it and it is smaller, unless `as_file` was measured to draft
    more in its time."""
    activations: ActivationPrecision = "auto"
    """The number format of activations. `auto` takes the runtime's first class for the draft's exactness."""
    kv_cache_precision: KvCachePrecision = "auto"
    """The number format of its KV cache: as `model.kv_cache_precision`, at any exactness of the target."""
    kv_cache: Size = Field(default=ByteSize(256 * 1024 * 1024))
    """Memory of its KV cache. Where it is too small for all sequences, those drafted for least recently are computed
    again."""
    device_layers: DeviceLayers = "all"
    """How many layers a GPU holds at most: as `model.device_layers`."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of its runtime; 0 is one for each of its `cores`, and `devices.threads` where it has none."""
    cores: Cores = Field(default=[])
    """With `process: own`: the CPU cores that it runs on, by their numbers on its host. Empty: all."""
    process: Literal["target", "own"] = "target"
    """`target`: in the target's worker. `own`: in a worker of its own, which the target neither waits for nor needs."""
    workers: DraftWorkersSection = _EACH_ITS_OWN
    """How many workers of it there are, with `process: own`."""
    host: str = ""
    """With `process: own` on Ray: the address of the node that it runs on. Empty: any."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """With `process: own`: whether it drafts on while the target verifies. `auto`: unless they share cores or a
    device."""
    max_wait_ms: float = Field(default=100.0, ge=0, le=60_000)
    """With `process: own`: the longest that a round waits for its drafts. A round never waits longer than they are
    worth by what was measured."""
    answer_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """With `process: own`: a worker that has not answered for so long is started again. Reading a long prompt is part
    of it."""
    mismatched_vocabulary: Literal["refuse", "translate"] = "refuse"
    """What to do where its tokens mean other text than the target's. `refuse`: do not start. `translate`: encode what
    it proposes with the target's tokenizer. Rows that only fill a vocabulary up are no difference."""


class EndpointDraft(Section):
    """A drafter that is a model on a llama-server, wherever that runs: it is sent token ids and returns token ids."""

    method: Literal["model"]
    """The kind of drafter."""
    endpoint: str = Field(min_length=1, max_length=2048)
    """The server's address, as in `http://mac:8080`. Nothing is loaded here, so keys that say how a model is loaded do
    not go with it. It may come and go."""
    api_key_file: str = Field(default="", max_length=4096)
    """A file with the server's API key (relative to this configuration file), on every host that has a worker of the
    target. It is read with each connection. Empty: the server wants none."""
    source: str = Field(default="", max_length=4096)
    """With `mismatched_vocabulary: translate`: a model with the server's tokenizer, written as `model.source`. Only its
    tokenizer is read."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """Whether it drafts on while the target verifies. `auto`: unless the server is on the target's machine."""
    max_wait_ms: float = Field(default=100.0, ge=0, le=60_000)
    """The longest that a round waits for its drafts. A round never waits longer than they are worth by what was
    measured."""
    answer_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """A server that has not answered for so long is connected to anew. Reading a long prompt is part of it."""
    mismatched_vocabulary: Literal["refuse", "translate"] = "refuse"
    """What to do where its tokens mean other text than the target's. `refuse`: it drafts nothing. `translate`: encode
    what it proposes with the target's tokenizer."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if not is_http_url(value):
            raise ValueError("must be the address of a llama-server, as http://HOST:8080")
        return value.rstrip("/")


AnyDraft = SuffixDraft | IndexDraft | HeadDraft | ModelDraft | EndpointDraft
METHODS = ("suffix", "index", "head", "model")
_ENDPOINT = "endpoint"
DRAFTS: dict[str, type[Section]] = {
    "suffix": SuffixDraft,
    "index": IndexDraft,
    "head": HeadDraft,
    "model": ModelDraft,
    _ENDPOINT: EndpointDraft,
}
"""What an item of `drafts` is, by its `method`; a model that has an `endpoint` by that."""


def _choose_draft(value: object) -> object:
    """Return which of `DRAFTS` an item of `drafts` is; None where it does not say."""
    if isinstance(value, Section):
        return next((tag for tag, section in DRAFTS.items() if type(value) is section), None)
    if not isinstance(value, Mapping):
        return METHODS[0]  # which says that it wants a mapping, as any of them would
    method = value.get("method")
    if method is None or method in METHODS:
        return _ENDPOINT if method == "model" and _ENDPOINT in value else method
    return "none of them"


Draft = Annotated[
    Annotated[SuffixDraft, Tag("suffix")]
    | Annotated[IndexDraft, Tag("index")]
    | Annotated[HeadDraft, Tag("head")]
    | Annotated[ModelDraft, Tag("model")]
    | Annotated[EndpointDraft, Tag(_ENDPOINT)],
    Discriminator(_choose_draft),
]


def choose_answer_store(drafts: Sequence[AnyDraft]) -> tuple[str, DraftStoreOptions] | None:
    """Return where a target's answers are kept outside its workers, and how that is used; None: nowhere."""
    suffix = (draft for draft in drafts if isinstance(draft, SuffixDraft))
    return next(((draft.store, draft.store_options) for draft in suffix if draft.store != MEMORY), None)


def draft_names(drafts: Sequence[AnyDraft], prefix: str = "") -> list[str]:
    """Return what the daemon calls each draft: its method, with a number where there are several of one; an index is
    called by its store."""
    names: list[str] = []
    for index, draft in enumerate(drafts):
        name = _name_kind(draft)
        before = sum(_name_kind(other) == name for other in drafts[:index])
        names.append(prefix + (f"{name}-{before + 1}" if before else name))
    return names


def own_draft_names(drafts: Sequence[AnyDraft], number: int, everybody: Sequence[AnyDraft]) -> list[str]:
    """Return what the daemon calls the drafts of the replica whose item has this number. Draft workers are known by
    these names, whoever they draft for. So a model has the number in its own, unless it is that of a draft of
    `everybody` whose workers any replica may share."""
    shared = [
        (draft.model_copy(update={"workers": _EACH_ITS_OWN}), name)
        for draft, name in zip(everybody, draft_names(everybody), strict=True)
        if isinstance(draft, ModelDraft) and draft.process == "own" and draft.workers.min
    ]

    names = []
    for draft, name in zip(drafts, draft_names(drafts), strict=True):
        own = name if draft.method != "model" else f"replica-{number}-{name}"
        known = (common for other, common in shared if other == draft and common not in names)
        names.append(next(known, own))
    return names


def _name_kind(draft: AnyDraft) -> str:
    return f"{draft.method}-{draft.store}" if isinstance(draft, IndexDraft) else draft.method
