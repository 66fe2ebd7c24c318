"""cluster.yaml as frozen, strict models. Descriptions here are the reference: the JSON Schema carries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import ByteSize, Field, PrivateAttr

from orchestrator.config.alerts import AlertsSection
from orchestrator.config.drafts import AnyDraft, Draft, ModelDraft, SuffixDraft
from orchestrator.config.failover import FailoverSection
from orchestrator.config.further_target import FurtherTarget
from orchestrator.config.hosts import ClusterHost, ClusterLinks
from orchestrator.config.model_keys import THIS_NODE, Cores
from orchestrator.config.placement import PlacementSection
from orchestrator.config.routing import RoutingSection, SloSection
from orchestrator.config.runtimes import AdaptersSection
from orchestrator.config.section import Price, ReserveSize, Section, Size
from orchestrator.config.socket_place import DEFAULT_PORT
from orchestrator.config.source_text import Place
from orchestrator.config.sources import NOT_LOOKED, FoundSources
from orchestrator.config.speculation import Canary, Speculation
from orchestrator.config.target import AUTO, OwnTarget, Target
from orchestrator.config.tls import TlsSection
from orchestrator.config.tracing import TracingSection


class Devices(Section):
    """What the worker may use of this machine."""

    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of the runtime; 0 is one for each of `cores`, and where there are none the count is the runtime's."""
    cores: Cores = Field(default=[])
    """The CPU cores that the worker runs on, by their numbers on its host. Empty: all. Several replicas have their own:
    `model.replicas`."""
    price_per_hour: Price = 0.0
    """What this machine costs an hour with its devices, in units of `placement.currency`: for the cost of a token in
    plans, status and metrics. 0: not known."""


class Limits(Section):
    """Bounds on memory, concurrency and time."""

    kv_cache: Size = Field(default=ByteSize(1024 * 1024 * 1024))
    """Memory of the target's KV cache, of each replica."""
    models_memory: Size | None = None
    """Bytes that all models together may have on each device, where some of them need not stay (`model.keep`). Left
    out: what the device has, where that can be told."""
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
    kv_disk: Size = Field(default=ByteSize(0))
    """Disk for the KV cache of beginnings that several requests had, as system prompts, in the model store of each
    host: a worker that starts anew, or has forgotten them, reads them. `0 B` keeps none. The files hold what prompts
    said."""
    request_timeout_s: float = Field(default=0.0, ge=0, le=86_400)
    """The longest time for one request, its waiting included; 0 is no limit. A request may ask for less."""
    quarantine_s: float = Field(default=3600.0, ge=0, le=86_400)
    """How long a request is refused that has ended workers: its prompt, with the same grammar and sampling. Or one that
    has ended the daemon: its body."""
    max_body: Size = Field(default=ByteSize(8 * 1024 * 1024))
    """The largest request body."""
    max_parameters: Size = Field(default=ByteSize(256 * 1024))
    """The largest part of a body that is neither prompt nor content of messages: tools, schemas, biases. More is
    answered 400 before it is parsed."""
    max_grammar: Size = Field(default=ByteSize(64 * 1024))
    """The largest grammar: a schema of `response_format`, or of tools that are forced or strict. The time that a
    grammar takes to compile, and at each token, may grow with the square of its size."""
    max_bodies: Size = Field(default=ByteSize(64 * 1024 * 1024))
    """Bytes of bodies that are read and translated at one time, of all requests together; one that needs more is
    answered 429."""
    translation_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """How long a body may be translated, its turn included; its chat template has half of that. A grammar has this time
    once more. Where the turn does not come a request is answered 429, where it takes longer 400."""
    max_requests_per_key: int = Field(default=0, ge=0, le=1_000_000)
    """Requests that one key of `api.keys_file` may have running or waiting; one more is answered 429. 0 is no
    limit."""
    max_tokens_per_minute_per_key: int = Field(default=0, ge=0, le=1_000_000_000)
    """Tokens of prompts and answers that one key may have in a minute; who has had them is answered 429. 0 is no
    limit."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """How long running streams may go on after SIGTERM or Ctrl-C; a second Ctrl-C ends them at once."""


class Api(Section):
    """The HTTP endpoint."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """The port; 0 takes a free one and prints it."""
    admin_socket: str = ""
    """The Unix socket of the admin commands. Empty: `outrider-PORT.sock` in the user's runtime directory."""
    keys_file: str = ""
    """A file of API keys, which `outrider keys create` writes (relative to this configuration file); other users must
    not be able to read it. Empty: no key is asked for."""
    allow_keyless: bool = False
    """`true`: everybody who reaches `host` may use the daemon without a key. `false`: without `keys_file`, a `host`
    that other machines reach is refused."""
    metrics_without_key: bool = False
    """`true`: `/metrics` and `/version` are open where there are keys. `false`: `/metrics` asks for a key with the
    scope `metrics`, and `/version` for any."""
    allowed_hosts: list[str] = Field(default=[], max_length=64)
    """Names that requests may be sent to, beside addresses, `localhost` and this machine's own: `llm.example.org`,
    `*.example.org`, or `*` for any. Without keys, a request to another name is refused: a web page may have made it.
    With keys, names are looked at only where there are some here."""
    allowed_origins: list[str] = Field(default=[], max_length=64)
    """Origins of web pages that may use the daemon, as in `https://chat.example.org`; they get CORS headers. `*`: any,
    where there are keys. A page of another origin is refused."""
    tls: TlsSection = TlsSection()
    """Encryption of the endpoint."""
    stalled_after_s: float = Field(default=30.0, gt=0, le=3600)
    """`/health/decode` says "stalled" when requests are live and no round was finished for so long."""
    max_connections: int = Field(default=4096, ge=16, le=1_000_000)
    """Open connections; beyond them the one that was idle for longest is closed, and where none is idle a new one is
    answered 429. The limit on open files is raised for them as far as the system allows."""
    header_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """How long the head of a request may take from its first byte; then it is answered 408."""
    body_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """How long a body may take; then it is answered 408."""
    idle_timeout_s: float = Field(default=75.0, gt=0, le=86_400)
    """How long a connection may stay open without a request."""
    write_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """How long an answer waits for a client that has stopped reading, once the buffers are full; then its connection
    is cut. While the daemon drains, 5 s at the most."""
    headers_after_s: float = Field(default=1.5, gt=0, le=3600)
    """How long the headers of a streamed answer wait for its first token. What goes wrong until then has a status of
    its own; later it is an event of the stream."""
    keep_alive_s: float = Field(default=5.0, ge=0, le=3600)
    """After so long without an event a stream says that it lives: by a comment, or a `ping` on `/v1/messages`. 0:
    never."""
    vllm_metric_names: bool = False
    """`true`: `/metrics` has what vLLM has too a second time under its names (`vllm:...`), for its dashboards and for
    `vllm bench serve`."""
    allow_chat_templates: bool = False
    """`true`: a chat may bring a `chat_template` in place of the model's own. It is run in the same sandbox."""
    stored_responses: int = Field(default=1000, ge=0, le=1_000_000)
    """How many answers of `/v1/responses` are kept in memory, for `previous_response_id`; beyond them the oldest go. 0:
    none are kept."""
    stored_responses_memory: Size = Field(default=ByteSize(64 * 1024 * 1024))
    """Bytes of all answers that are kept, with their conversations; beyond them the oldest go."""
    stored_responses_s: float = Field(default=3600.0, gt=0, le=604_800)
    """How long an answer is kept."""


class ClusterSection(Section):
    """How worker processes are started."""

    runtime: Literal["auto", "ray", "local"] = "auto"
    """`local`: a subprocess on this machine. `ray`: an actor, on any host of a Ray cluster. `auto`: `ray` where there
    is an `address`, else `local`."""
    address: str = ""
    """A Ray cluster, by the address of its head (`HOST:PORT`; `auto`: the one of this machine). Empty, with
    `runtime: ray`: the daemon starts its own on this machine."""
    head: bool = False
    """`true`: the daemon keeps the head itself, at `address`, which is one of this machine's: it starts it, and again
    whenever it ends. Other hosts come by `outrider join`. Where there is no token, it makes one."""
    auth: Literal["token", "none"] = "token"
    """`token`: a Ray at `address` is joined with its token only (`RAY_AUTH_TOKEN`, or a file that
    `RAY_AUTH_TOKEN_PATH` names). `none`: it has none, and whoever reaches its ports runs code on its hosts."""
    discover: bool = True
    """With `address`, where something is `auto`: whether the plan uses every host of the cluster, those that join
    later too. `false`: those of `hosts`, and where that is empty the daemon's own."""
    job_server: bool = False
    """`true`: the daemon's own Ray (`runtime: ray` without an address) takes jobs, at 127.0.0.1 and port 8265 or the
    next free one, for `outrider submit` and `ray job submit`. Needs `outrider extras install jobs` and a token in
    `RAY_AUTH_TOKEN`."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """Restarts of a worker within ten minutes, at most 15 s apart; then it is started once a minute. Each worker has
    its own. Where one served for 5 s, those before it count no more. Where none ever served, the daemon ends."""
    orphan_wait_s: float = Field(default=60.0, ge=0, le=3600)
    """How long a worker that lost its daemon keeps its model loaded for the next one; 0 ends it with the daemon. Ray
    ends its workers with the daemon."""

    @property
    def on_ray(self) -> bool:
        """Whether workers are Ray actors."""
        return self.runtime == "ray" or (self.runtime == "auto" and bool(self.address))

    @property
    def across_hosts(self) -> bool:
        """Whether workers may be on other hosts: of a Ray that is named."""
        return self.on_ray and bool(self.address)


class Store(Section):
    """Where prepared models are kept."""

    directory: str = ""
    """Empty: the user's cache directory (`$XDG_CACHE_HOME/outrider`); systemd's `CACHE_DIRECTORY` where set."""
    max_size: Size | None = None
    """What prepared models may take there, on each host. Where they take more, those that were used least recently go,
    and are made again when they are wanted. What is loaded stays. Left out: no bound."""


class StateSection(Section):
    """What a daemon leaves for the next one of the same configuration: its workers, and its streams."""

    directory: str = ""
    """A directory of one daemon alone; a second one with it does not start. Empty: one for each configuration file and
    port, in the user's state directory (`$XDG_STATE_HOME/outrider`), or in systemd's `STATE_DIRECTORY` where set."""


class JournalSection(Section):
    """The record of answers that a client may resume."""

    enabled: bool = True
    """`false`: nothing is written. A lost connection can still be resumed, but nothing outlives the daemon. The
    journal holds prompts and answers as tokens, in files that only the daemon's user can read."""
    memory: Size = Field(default=ByteSize(64 * 1024 * 1024))
    """What is kept at most, in memory. Where that is not enough, ended answers are forgotten first."""
    reserve: ReserveSize = Field(default=ByteSize(16 * 1024 * 1024))
    """What is allocated ahead of the disk, so that a disk that others fill stops nothing. Half of it holds what is
    kept: up to 5 bytes for a token of a prompt, and 10 for one of an answer. Where that needs more, it takes more while
    there is room. On a full disk the oldest ended answers give way first."""
    ended_s: float = Field(default=60.0, ge=0, le=86_400)
    """How long an answer is kept behind its end, for a client that has lost it."""
    detached_s: float = Field(default=30.0, ge=0, le=3600)
    """How long a request with an `Idempotency-Key` goes on without a client. Others are cancelled at once."""
    sync_s: float = Field(default=0.0, ge=0, le=3600)
    """How often the file is forced to the disk, against a loss of power; 0 leaves that to the kernel. The daemon's own
    death loses nothing either way."""


class BatchesSection(Section):
    """Batches that the daemon itself answers, by OpenAI's routes `/v1/files` and `/v1/batches`."""

    enabled: bool = True
    """`false`: these routes answer 404, and batches of an earlier daemon wait."""
    concurrency: int = Field(default=8, ge=1, le=1024)
    """Lines of batches at a time, of all batches together. One begins only where no other request waits, and one place
    stays free."""
    max_file: Size = Field(default=ByteSize(64 * 1024 * 1024))
    """The largest file that is taken."""
    max_storage: Size = Field(default=ByteSize(1024 * 1024 * 1024))
    """What inputs and outputs may take on the disk, in the state directory. A batch whose output does not fit fails
    with what it has."""
    max_files: int = Field(default=1000, ge=1, le=100_000)
    """Files at a time; one more is refused."""
    max_batches: int = Field(default=100, ge=1, le=10_000)
    """Batches at a time. The oldest that has ended is forgotten for a new one; where none has, that is refused."""
    keep_s: float = Field(default=2_592_000.0, ge=60, le=31_536_000)
    """How long files and ended batches are kept: 30 days."""


class Logging(Section):
    """The daemon's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe entry that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: for people on a terminal, JSON lines elsewhere."""
    prompts: bool = False
    """`true`: the log also has each request's and answer's text, and what a bug's exception says."""
    audit_file: str = ""
    """A file that gets each admin call that changes something and each refused use of a key, as JSON lines (relative
    to this configuration file). Empty: only the log has them, at level info."""


class ClusterConfig(Section):
    """The whole of cluster.yaml."""

    model: Target
    """The target model."""
    drafts: tuple[Draft, ...] = Field(default=(SuffixDraft(method="suffix"),), max_length=4, strict=False)
    """The drafters, in order of cost: a later one is asked where the earlier ones have little to propose. An empty list
    is plain decoding."""
    speculation: Speculation = Speculation()
    """How speculation runs when a request does not say otherwise."""
    models: tuple[FurtherTarget, ...] = Field(default=(), max_length=15, strict=False)
    """Further target models behind the same endpoint. A request's `model` chooses one by its name."""
    canary: Canary = Canary()
    """A share of the requests that another variant drafts for. Those of `models` have none."""
    devices: Devices = Devices()
    """What the worker may use of this machine."""
    placement: PlacementSection = PlacementSection()
    """What a plan is for, and what it may do."""
    hosts: tuple[ClusterHost, ...] = Field(default=(), max_length=10_000, strict=False)
    """What is known of the hosts of `cluster.address`. One that is not listed has every role, all its devices and no
    zone. `outrider plan --cluster` plans for those here that are not there, too."""
    links: ClusterLinks = ClusterLinks()
    """Links between hosts that are stated instead of measured."""
    routing: RoutingSection = RoutingSection()
    """How a replica is chosen for a request."""
    failover: FailoverSection = FailoverSection()
    """What takes the target's place when it is lost."""
    limits: Limits = Limits()
    """Bounds on memory, concurrency and time."""
    slo: SloSection = SloSection()
    """Service level objectives, and what is done for them."""
    api: Api = Api()
    """The HTTP endpoint."""
    cluster: ClusterSection = ClusterSection()
    """How worker processes are started."""
    adapters: AdaptersSection = AdaptersSection()
    """Settings of single runtimes."""
    store: Store = Store()
    """Where prepared models are kept."""
    state: StateSection = StateSection()
    """What a daemon leaves for the next one."""
    journal: JournalSection = JournalSection()
    """The record of answers that a client may resume."""
    batches: BatchesSection = BatchesSection()
    """Batches that the daemon answers by itself."""
    alerts: AlertsSection = AlertsSection()
    """The daemon's own watch over what goes wrong."""
    logging: Logging = Logging()
    """The daemon's log."""
    tracing: TracingSection = TracingSection()
    """Spans and metrics of OpenTelemetry."""

    _sources: FoundSources = PrivateAttr(default=NOT_LOOKED)
    _further: tuple[int, FurtherTarget] | None = PrivateAttr(default=None)
    """Whose configuration this is, of `models`, and its index; None: of the first target."""
    _undrafted: Mapping[int, str] = PrivateAttr(default={})
    """By the numbers of targets whose drafts are left off, why."""

    @property
    def sources(self) -> FoundSources:
        """Return what its sources were found to be, where somebody has looked."""
        return self._sources

    def with_sources(self, sources: FoundSources) -> ClusterConfig:
        """Return the same configuration, with what its sources were found to be."""
        copy = self.model_copy()
        copy._sources = sources
        return copy

    @property
    def model_sources(self) -> tuple[str, ...]:
        """Return the sources of its target and of all its drafts, as the file says them, each once."""
        drafts = [draft.source for _, draft in self.all_drafts if isinstance(draft, ModelDraft)]
        return tuple(dict.fromkeys((self.model.source, *drafts)))

    @property
    def targets(self) -> tuple[ClusterConfig, ...]:
        """Return the configuration of each target as if it were alone: that of `model`, then those of `models`."""
        if not self.models:
            return (self._leave_off_drafts(),)
        first = self.model_copy(update={"models": ()})
        views = (first, *(first._view_further(*further) for further in enumerate(self.models)))
        return tuple(view._leave_off_drafts() for view in views)

    def without_drafts(self, reasons: Mapping[int, str]) -> ClusterConfig:
        """Return the same configuration, whose `targets` of these numbers have no drafts, and why."""
        copy = self.model_copy()
        copy._undrafted = reasons
        return copy

    @property
    def no_drafts(self) -> str:
        """Why this target's drafts are left off, whatever the file says of them; "" where they are not."""
        return self._undrafted.get(self.number, "")

    def _leave_off_drafts(self) -> ClusterConfig:
        if not self.no_drafts:
            return self
        off = self.speculation.model_copy(update={"method": "off"})
        changes: dict[str, object] = {"drafts": (), "canary": Canary(), "speculation": off}
        if self.own_drafts:
            plain = [replica.model_copy(update={"drafts": None}) for replica in self.model.placements]
            changes["model"] = self.model.model_copy(update={"replicas": plain})
        return self.model_copy(update=changes)

    def _view_further(self, index: int, further: FurtherTarget) -> ClusterConfig:
        view = self.model_copy(
            update={
                "model": further.target,
                "drafts": further.drafters,
                "canary": Canary(),
                "speculation": further.speculation or self.speculation,
                "slo": further.slo or self.slo,
                "placement": further.placement or self.placement,
                "failover": further.failover or self.failover.model_copy(update={"standby": ()}),
                "devices": self.devices.model_copy(
                    update={"cores": further.cores, "threads": further.threads or self.devices.threads}
                ),
                "limits": self.limits.model_copy(update=further.own_limits),
            }
        )
        view._further = (index, further)
        return view

    @property
    def number(self) -> int:
        """Return which target of the file this configuration is of, from 0."""
        return 0 if self._further is None else self._further[0] + 1

    def find_place(self, *place: str | int) -> Place:
        """Return where in the file a value stands, or would, that is at `place` in this configuration."""
        if self._further is None:
            return place
        index, further = self._further
        return ("models", index, *mine) if (mine := further.find_own(*place)) else place

    @property
    def planned(self) -> bool:
        """True where a plan chooses anything for this target; those of `models` have a configuration each."""
        models: list[Target | ModelDraft] = [self.model]
        models += [draft for draft in self.drafts if isinstance(draft, ModelDraft)]
        return any(AUTO in (model.adapter, model.device) for model in models)

    @property
    def plans_hosts(self) -> bool:
        """True where a plan is made over hosts of a Ray cluster."""
        return self.planned and bool(self.cluster.address) and (self.cluster.discover or bool(self.hosts))

    @property
    def own_targets(self) -> list[tuple[Place, OwnTarget]]:
        """Return the ways in which workers run the target, with their places in the file: replicas, then standbys."""
        return [*self.own_replicas, *self.own_standbys]

    @property
    def own_standbys(self) -> list[tuple[Place, OwnTarget]]:
        """Return the standbys, with their places in the file."""
        return [(self.find_place("failover", "standby", n), standby) for n, standby in enumerate(self.failover.standby)]

    @property
    def own_replicas(self) -> list[tuple[Place, OwnTarget]]:
        """Return the ways in which replicas run the target: that of `model` for all that have none of their own, then
        theirs. Endpoints are left out."""
        replicas = [
            (self.find_place("model", "replicas", n), replica)
            for n, replica in enumerate(self.model.placements)
            if not replica.is_endpoint
        ]
        plain = [replica for _, replica in replicas if not replica.own_model]
        first = sorted(plain, key=lambda replica: replica.host != THIS_NODE)[:1]
        unlike = [(at, replica) for at, replica in replicas if replica.own_model]
        return [*((self.find_place("model", "device")[:-1], replica) for replica in first), *unlike]

    @property
    def own_drafts(self) -> list[tuple[Place, AnyDraft]]:
        """Return the drafts that replicas have of their own, with their places in the file."""
        return [
            (self.find_place("model", "replicas", number, "drafts", index), draft)
            for number, replica in enumerate(self.model.placements)
            for index, draft in enumerate(replica.own_drafts or ())
        ]

    @property
    def all_drafts(self) -> list[tuple[Place, AnyDraft]]:
        """Return every draft, those of single replicas and the canary's too, with its place in the file."""
        drafts: list[tuple[Place, AnyDraft]] = []
        drafts += [(self.find_place("drafts", index), draft) for index, draft in enumerate(self.drafts)]
        drafts += self.own_drafts
        drafts += [(("canary", "drafts", index), draft) for index, draft in enumerate(self.canary_drafts)]
        return drafts

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
        if own.acceptance != "same":
            changes["acceptance"] = own.acceptance
        return self.speculation.model_copy(update=changes)
