"""cluster.yaml as frozen, strict models. Descriptions here are the reference: the JSON Schema carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ByteSize, Discriminator, Field, Tag

from device_profiles.profile import Exactness
from orchestrator.config.placement import PlacementSection
from orchestrator.config.section import Section, Size
from orchestrator.config.slo import SloSection

MAX_REPLICAS = 64

AUTO = "auto"
"""The plan chooses (`placement`)."""

AdapterName = Literal["openvino_rt", "onnx_rt", "torch_device", "simulated", "auto"]


WeightsPrecision = Literal["auto", "as_file", "int4", "int8", "bf16", "fp16", "fp32"]
ActivationPrecision = Literal["auto", "bf16", "fp16", "fp32"]
KvCachePrecision = Literal["auto", "16bit", "8bit"]


Cores = Annotated[list[Annotated[int, Field(ge=0, le=4095)]], Field(max_length=1024)]


class Placement(Section):
    """Where one replica of the target runs."""

    host: str = ""
    """On Ray: the address of the node that it runs on. Empty: any."""
    cores: Cores = Field(default=[])
    """The CPU cores that it runs on, by their numbers on its host. Empty: all."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of its runtime; 0 is one for each of its `cores`, and `devices.threads` where it has none."""


def _kind_of_replicas(value: object) -> str:
    return PLACED if isinstance(value, (list, tuple)) else COUNTED


COUNTED, PLACED = "a number of replicas", "a list of replicas"
"""What `model.replicas` is, as pydantic's places name it."""

Replicas = Annotated[
    Annotated[int, Field(ge=1, le=MAX_REPLICAS), Tag(COUNTED)]
    | Annotated[list[Placement], Field(min_length=1, max_length=MAX_REPLICAS), Tag(PLACED)],
    Discriminator(_kind_of_replicas),
]


class StaticShapes(Section):
    """How a model runs where shapes are static."""

    static_shapes: Literal["auto", "on"] = "auto"
    """Graphs of fixed shape, one sequence a forward (`openvino_rt`): `auto` where the device takes nothing else
    (`NPU`), `on` also where it does not need them."""
    static_context_tokens: int = Field(default=0, ge=0, le=131_072)
    """With static shapes: the longest sequence, prompt and output, in tokens. Every forward attends over so many. 0:
    what the model and the KV cache hold, at most 2048."""
    static_prefill_rows: int = Field(default=128, ge=1, le=4096)
    """With static shapes: the rows of a forward of a prompt; a graph is compiled for them."""
    static_verify_rows: list[Annotated[int, Field(ge=1, le=256)]] = Field(default=[1, 4, 8], min_length=1, max_length=8)
    """With static shapes: the rows of forwards that decode or verify, the draft's among them; a graph is compiled for
    each."""


class Target(StaticShapes):
    """The target model: what is served, and on which runtime it runs."""

    source: str = Field(min_length=1)
    """Where the weights are: `package:NAME/FILE` (a file inside an installed Python package), the path of a GGUF
    file or of a Hugging Face directory (relative to this configuration file), `hf:ORG/NAME`, `hf:ORG/NAME@REVISION`
    or `hf:ORG/NAME/FILE.gguf` (a model of the Hugging Face hub), or `simulated:toy` (no weights)."""
    name: str = Field(default="", max_length=128)
    """The model's name in the API. Empty: taken from the source."""
    adapter: AdapterName = "openvino_rt"
    """The runtime that runs it. `auto`: the plan chooses among those that are installed (`placement`)."""
    device: str = "CPU"
    """The device, as the runtime names it. `auto`: the plan chooses."""
    exactness: Annotated[Exactness, Field(strict=False)] = Exactness.BIT
    """`bit`: output is identical to the last bit whatever shares the batch. `kernel`: faster with many sequences,
    and the last bits may depend on the batch."""
    weights: WeightsPrecision = "auto"
    """The number format of the weights. `as_file` takes them as the source has them. `auto` chooses by device: int8 for
    NPUs, bf16 or fp16 for GPUs, on CPUs what `outrider models quality` measured fastest, and `as_file` until it did."""
    activations: ActivationPrecision = "auto"
    """The number format of activations; `auto` takes the fastest that the device computes natively."""
    kv_cache_precision: KvCachePrecision = "auto"
    """The number format of the KV cache. `8bit` holds twice the tokens; rows are not invariant then, so it needs
    `exactness: kernel`."""
    replicas: Replicas = 1
    """How many workers serve it: a number, or a list that says where each runs. Each has a KV cache of
    `limits.kv_cache` and decodes `limits.max_running` sequences."""

    @property
    def placements(self) -> list[Placement]:
        """Return where each replica runs."""
        return [Placement()] * self.replicas if isinstance(self.replicas, int) else self.replicas


class SuffixDraft(Section):
    """A drafter that continues the longest match in the request's own text and in earlier outputs."""

    method: Literal["suffix"]
    """The kind of drafter."""
    max_match: int = Field(default=16, ge=1, le=32)
    """The longest context that is matched, in tokens."""
    memory: Size = Field(default=ByteSize(64 * 1024 * 1024))
    """Memory for earlier outputs; the oldest are forgotten first. `0 B` keeps none."""


class ModelDraft(StaticShapes):
    """A drafter that is a model: any that the runtimes load."""

    method: Literal["model"]
    """The kind of drafter."""
    source: str = Field(min_length=1)
    """Where the weights are: written as `model.source`."""
    adapter: AdapterName = "openvino_rt"
    """The runtime that runs it. `auto`: the plan chooses among those that are installed (`placement`)."""
    device: str = "CPU"
    """The device, as the runtime names it. `auto`: the plan chooses."""
    weights: WeightsPrecision = "auto"
    """The number format of the weights: as `model.weights`."""
    activations: ActivationPrecision = "auto"
    """The number format of activations; `auto` takes the fastest that the device computes natively."""
    kv_cache_precision: KvCachePrecision = "auto"
    """The number format of its KV cache: as `model.kv_cache_precision`, at any exactness of the target."""
    kv_cache: Size = Field(default=ByteSize(256 * 1024 * 1024))
    """Memory of its KV cache. Where it is too small for all sequences, those drafted for least recently are computed
    again."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of its runtime; 0 is one for each of its `cores`, and `devices.threads` where it has none."""
    cores: Cores = Field(default=[])
    """With `process: own`: the CPU cores that it runs on, by their numbers on its host. Empty: all."""
    process: Literal["target", "own"] = "target"
    """`target`: in the target's worker. `own`: in a worker of its own, which the target neither waits for nor needs."""
    host: str = ""
    """With `process: own` on Ray: the address of the node that it runs on. Empty: any."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """With `process: own`: whether it drafts on while the target verifies. `auto`: unless they share a device."""
    max_wait_ms: float = Field(default=100.0, ge=0, le=60_000)
    """With `process: own`: the longest that a round waits for its drafts. A round never waits longer than they are
    worth by what was measured."""
    answer_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """With `process: own`: a worker that has not answered for so long is started again. Reading a long prompt is part
    of it."""
    mismatched_vocabulary: Literal["refuse", "translate"] = "refuse"
    """What to do where its tokens mean other text than the target's. `refuse`: do not start. `translate`: encode what
    it proposes with the target's tokenizer. Rows that only fill a vocabulary up are no difference."""


Draft = Annotated[SuffixDraft | ModelDraft, Field(discriminator="method")]
DRAFTS: dict[str, type[Section]] = {"suffix": SuffixDraft, "model": ModelDraft}
"""What an item of `drafts` is, by its `method`."""


def draft_names(drafts: Sequence[SuffixDraft | ModelDraft], prefix: str = "") -> list[str]:
    """Return what the daemon calls each draft: its method, with a number where there are several of one."""
    names: list[str] = []
    for index, draft in enumerate(drafts):
        before = sum(other.method == draft.method for other in drafts[:index])
        names.append(prefix + (f"{draft.method}-{before + 1}" if before else draft.method))
    return names


class Speculation(Section):
    """How speculation runs when a request does not say otherwise."""

    method: Literal["auto", "fixed", "off"] = "auto"
    """`auto`: the depth follows what pays. `fixed`: every round drafts `num_speculative_tokens`, whatever it costs.
    `off` switches every drafter off: plain decoding in the same loop."""
    num_speculative_tokens: int = Field(default=12, ge=0, le=64)
    """The most tokens drafted for one sequence in one round (depth); 0 is plain decoding. Nobody's wish goes beyond."""
    min_speculative_tokens: int = Field(default=0, ge=0, le=64)
    """The least depth that a request, or a wish for a session or an engine, can ask for where it does not switch
    speculation off; at most `num_speculative_tokens`."""
    low_acceptance_rate: float = Field(default=0.15, ge=0, lt=1)
    """The log warns, with the likely cause, where a drafter's acceptance rate is below; 0: never."""
    acceptance: Literal["coupled", "rejection", "tolerance"] = "coupled"
    """The rule by which drafts become output, for requests that name none. `coupled`: the target's own tokens,
    whatever is drafted. `rejection`: the target's distribution; which tokens come out depends on the drafts.
    `tolerance`: lossy; more drafts are accepted, and the output is not the target's."""
    allow_tolerance: bool = False
    """`true`: requests may ask for `tolerance`. It is allowed where it is the rule of `acceptance`, too."""
    tolerance_acceptance_rate: float = Field(default=0.9, gt=0, lt=1)
    """The share of judged drafts (those with all before them accepted) that `tolerance` is to accept."""
    tolerance_warmup_tokens: int = Field(default=512, ge=16, le=100_000)
    """Judged drafts that `tolerance` learns from before it applies; until then the rule is `rejection`. Greedy and
    sampled requests learn apart, and a new worker learns anew."""
    tolerance_max_delta: float = Field(default=2.0, gt=0, le=20)
    """The most by which a draft may be less likely to the target than to the drafter, in nats: 2 is 7.4 times."""


class CanarySpeculation(Section):
    """What of `speculation` is other for the canary."""

    method: Literal["same", "auto", "fixed", "off"] = "same"
    """As `speculation.method`; `same`: no other."""
    num_speculative_tokens: int = Field(default=0, ge=0, le=64)
    """As `speculation.num_speculative_tokens`; 0: no other."""


class Canary(Section):
    """A share of the requests is drafted for in another way, and compared with the rest until that is decided on."""

    share: float = Field(default=0.0, ge=0, le=0.5)
    """The share of requests that are served by the canary; 0: there is none."""
    speculation: CanarySpeculation = CanarySpeculation()
    """What of `speculation` is other for the canary."""
    drafts: tuple[Draft, ...] = Field(default=(), max_length=4, strict=False)
    """The canary's drafters, as in `drafts`; they are loaded beside those. Empty: the same."""
    decide: Literal["rule", "operator"] = "rule"
    """Who promotes it or rolls it back: the rule of the keys below, or `outrider canary promote` and `abort` alone. The
    operator's word counts in both cases."""
    least_requests: int = Field(default=50, ge=2, le=1_000_000)
    """Requests of each arm before anything is decided."""
    most_requests: int = Field(default=2000, ge=2, le=10_000_000)
    """Requests of the canary after which it is rolled back if it is not surely better."""
    min_gain: float = Field(default=0.02, ge=0, lt=1)
    """It is promoted where its TPOT is surely (95 %) lower by more than this share of the others'."""
    tolerance: float = Field(default=0.05, ge=0, le=1)
    """It is rolled back where its TTFT or TPOT is surely (95 %) higher by more than this share of the others'."""


class Devices(Section):
    """What the worker may use of this machine."""

    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of the runtime; 0 is one for each of `cores`, and where there are none the count is the runtime's."""
    cores: Cores = Field(default=[])
    """The CPU cores that the worker runs on, by their numbers on its host. Empty: all. Several replicas have their own:
    `model.replicas`."""


class Limits(Section):
    """Bounds on memory, concurrency and time."""

    kv_cache: Size = Field(default=ByteSize(1024 * 1024 * 1024))
    """Memory of the target's KV cache, of each replica."""
    max_running: int = Field(default=16, ge=1, le=1024)
    """Sequences decoded at the same time, by each replica."""
    max_waiting: int = Field(default=256, ge=0, le=100_000)
    """Requests that may wait for a place, all replicas together; one more is answered 429."""
    max_batch_rows: int = Field(default=1024, ge=16, le=8192)
    """Rows of one forward; longer prompts are prefilled in chunks."""
    max_itl_ms: float = Field(default=200.0, ge=1, le=60_000)
    """The longest forward that decodes and prefills, so the longest wait for a next token that a new prompt may
    cause to running streams: longer is sooner for the prompt. What a row of prefill costs is measured. Where decoding
    alone takes longer than half of it, prefill gets as much time as decoding. While an objective of `slo` is at risk,
    the bound is half or twice that."""
    prefix_reuse: bool = True
    """Keep the KV cache of prompts while there is room, and begin later requests with it where they begin alike."""
    request_timeout_s: float = Field(default=0.0, ge=0, le=86_400)
    """The longest time for one request, its waiting included; 0 is no limit. A request may ask for less."""
    max_body: Size = Field(default=ByteSize(8 * 1024 * 1024))
    """The largest request body."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """How long running streams may go on after SIGTERM."""


class Api(Section):
    """The HTTP endpoint."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port; 0 takes a free one and prints it."""
    admin_socket: str = ""
    """The Unix socket of the admin commands. Empty: `outrider-PORT.sock` in the user's runtime directory."""
    keys_file: str = ""
    """A file of API keys, one a line (relative to this configuration file); other users must not be able to read
    it. Empty: no key is asked for."""
    stalled_after_s: float = Field(default=30.0, gt=0, le=3600)
    """`/health/decode` says "stalled" when requests are live and no round was finished for so long."""
    vllm_metric_names: bool = False
    """`true`: `/metrics` has what vLLM has too a second time under its names (`vllm:...`), for its dashboards and for
    `vllm bench serve`."""


class ClusterSection(Section):
    """How worker processes are started."""

    runtime: Literal["ray", "local"] = "ray"
    """`ray`: an actor. `local`: a subprocess on this machine."""
    address: str = ""
    """An existing Ray cluster (`HOST:PORT` or `auto`). Empty: the daemon starts its own on this machine."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """Restarts of a worker within ten minutes before the daemon gives up on it; each worker has its own."""


class Store(Section):
    """Where prepared models are kept."""

    directory: str = ""
    """Empty: the user's cache directory (`$XDG_CACHE_HOME/outrider`); systemd's `CACHE_DIRECTORY` where set."""


class Logging(Section):
    """The daemon's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe entry that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: for people on a terminal, JSON lines elsewhere."""
    prompts: bool = False
    """`true`: the log also has each request's and answer's text, and what a bug's exception says."""


class ClusterConfig(Section):
    """The whole of cluster.yaml."""

    model: Target
    """The target model."""
    drafts: tuple[Draft, ...] = Field(default=(SuffixDraft(method="suffix"),), max_length=4, strict=False)
    """The drafters, in order of cost: a later one is asked where the earlier ones have little to propose. An empty list
    is plain decoding."""
    speculation: Speculation = Speculation()
    """How speculation runs when a request does not say otherwise."""
    canary: Canary = Canary()
    """A share of the requests that is drafted for in another way."""
    devices: Devices = Devices()
    """What the worker may use of this machine."""
    placement: PlacementSection = PlacementSection()
    """What a plan is for, and what it may do."""
    limits: Limits = Limits()
    """Bounds on memory, concurrency and time."""
    slo: SloSection = SloSection()
    """Service level objectives, and what is done for them."""
    api: Api = Api()
    """The HTTP endpoint."""
    cluster: ClusterSection = ClusterSection()
    """How worker processes are started."""
    store: Store = Store()
    """Where prepared models are kept."""
    logging: Logging = Logging()
    """The daemon's log."""

    @property
    def planned(self) -> bool:
        """True where a plan chooses anything."""
        models: list[Target | ModelDraft] = [self.model]
        models += [draft for draft in self.drafts if isinstance(draft, ModelDraft)]
        return any(AUTO in (model.adapter, model.device) for model in models)

    @property
    def all_drafts(self) -> list[tuple[tuple[str | int, ...], SuffixDraft | ModelDraft]]:
        """Return every draft, the canary's too, with its place in the file."""
        found: list[tuple[tuple[str | int, ...], SuffixDraft | ModelDraft]] = []
        found += [(("drafts", index), draft) for index, draft in enumerate(self.drafts)]
        found += [(("canary", "drafts", index), draft) for index, draft in enumerate(self.canary_drafts)]
        return found

    @property
    def canary_drafts(self) -> tuple[Draft, ...]:
        """The drafters that only the canary has; () where it has those of the rest."""
        return () if self.canary.drafts == self.drafts else self.canary.drafts

    @property
    def canary_speculation(self) -> Speculation:
        """How speculation runs for the canary."""
        own = self.canary.speculation
        changes: dict[str, object] = {} if own.method == "same" else {"method": own.method}
        if own.num_speculative_tokens:
            changes["num_speculative_tokens"] = own.num_speculative_tokens
        return self.speculation.model_copy(update=changes)
