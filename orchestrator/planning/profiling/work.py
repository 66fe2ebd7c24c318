"""What there is to measure: every model of the configuration, on every runtime and device that is here or asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from adapters import registry
from adapters.contract import AdapterUnavailable, FilesInPlace, ModelRefused, Unsupported
from adapters.decoder.spec import DecoderSizes
from adapters.device_memory import read_device_memory
from adapters.hardware import hardware, runtime_version
from adapters.model_digests import digest_at_hand
from adapters.model_source import check_model, refuse_runtime, resolve
from adapters.model_store import ModelStore
from adapters.names import CONVERTING_ADAPTERS, LLAMA_CPP, OWN_ADAPTERS, SHARDING_ADAPTERS, normalise_device
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.device_names import is_processor, is_same_device, number_unit
from device_profiles.measured import Hardware, MeasuredDevice, MeasuredModel
from device_profiles.profile import DeviceProfile, find_listed_device
from device_profiles.store import ProfileStore
from device_profiles.units import GIB
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.source_text import format_place
from orchestrator.config.target import AUTO
from orchestrator.errors import OutriderError
from orchestrator.fitting.profile_keys import build_profile_key, find_profile, profiles_in, threads_of
from orchestrator.fitting.worker_options import engine_options, list_own_drafters
from orchestrator.machine.devices import effective_device, find_device, mark_of
from orchestrator.planning.wanted import PlanError
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.load_options import ModelDraftOptions, ModelOptions
from orchestrator.protocol.measuring import CHAT_WORKLOAD, STEPS_S, ProbeOptions, ProfileJob, job_spec

THIS_HOST = "this host"
"""What stands for the only host there is, in the names of links."""
_PROCESS_BYTES = GIB // 2  # of a runtime without a model. Not tuned
_MEMORY_PER_FILE = 4  # what preparing and holding a model takes at most, by the size of its files
_MEASURING_LOCK = ".measuring.lock"  # in the store: whoever measures holds it


def paths(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Return every path between workers: within each host, and between every two."""
    return [(node, node) for node in nodes] + list(combinations(nodes, 2))


def echo_spec(node: str, *, across: bool) -> WorkerSpec:
    """Return the worker that opens an endpoint, for other hosts too where the path goes `across`."""
    entry = "orchestrator.worker.measuring.links:build_echo"
    return WorkerSpec(name=f"echo {name_of(node)}", entry=entry, options={"across": across}, node=node, cpus=0.0)


def probe_spec(endpoint: LinkEndpoint, left: str, right: str) -> WorkerSpec:
    """Return the worker that measures, on `left`."""
    options = msgspec.to_builtins(ProbeOptions(endpoint, name_of(left), name_of(right)), builtin_types=(bytes,))
    entry = "orchestrator.worker.measuring.links:build_probe"
    return WorkerSpec(
        name=f"link {name_of(left)} to {name_of(right)}", entry=entry, options=options, node=left, cpus=0.0
    )


def name_of(node: str) -> str:
    return node or THIS_HOST


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work, and what its results will be known by. `node`: the address of another host that it is done on,
    whose fingerprint is not known here: it counts as never done."""

    job: ProfileJob
    fingerprint: str
    threads: int
    node: str = ""

    @property
    def digest(self) -> str:
        """The digest of its model's files. Raises ModelRefused."""
        return find_source_digest(self.job.model)

    @property
    def title(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.job.model.adapter} {self.job.model.device}{where}, {self.job.drafter or self.job.role}"

    def spec(
        self,
        store: ProfileStore,
        *,
        refresh: bool,
        steps_s: float = STEPS_S,
        texts_are_new: bool = False,
        device_only: bool = False,
    ) -> WorkerSpec:
        """Return how its worker is started, with what is known already. `texts_are_new`: what the target says is not
        measured again, even where `refresh`. `device_only`: see ProfileJob."""
        known = not refresh and self.find_device_profile(store) is not None
        early = not refresh and self.find_model_profile(store) is None
        texts = None if refresh and self.job.role == "target" and not texts_are_new else self.texts(store)
        plain = None if texts is None else dataclasses.asdict(texts)
        job = msgspec.structs.replace(self.job, known_device=known, texts=plain, steps_s=steps_s, early=early)
        job = msgspec.structs.replace(job, device_only=device_only)
        return job_spec(job, self.node or THIS_NODE)

    def is_done(self, store: ProfileStore) -> bool:
        """Return whether all of it is stored, holds, and was measured while nobody else took the device."""
        model = self.find_model_profile(store)
        return self.is_known(store) and model is not None and not model.disturbed

    def is_known(self, store: ProfileStore) -> bool:
        paired = self.job.role == "target" or self.texts(store) is None or self.pair(store) is not None
        model = self.find_model_profile(store)
        holds = model is not None and not model.drifted and not model.unfinished
        return holds and self.find_device_profile(store) is not None and paired

    def can_plan(self, store: ProfileStore) -> bool:
        return self.find_model_profile(store) is not None and self.find_device_profile(store) is not None

    def is_prepared(self) -> bool:
        """Return whether its runtime loads the model at once: it reads the model's file as it is, or has converted it
        before."""
        model = self.job.model
        if model.source.startswith(SIMULATED_PREFIX) or isinstance(registry.get(model.adapter), FilesInPlace):
            return True
        made = ModelStore(Path(model.store)).all()
        return any((path.parent.name, of["recipe_name"]) == (self.digest, model.adapter) for path, of in made)

    def describe_doubt(self, store: ProfileStore) -> str:
        """Return why what is stored is to be measured again, "" where it is not, or nothing is stored."""
        model = self.find_model_profile(store)
        return model.doubt if model is not None else ""

    def find_model_profile(self, store: ProfileStore) -> MeasuredModel | None:
        """Return the profile of the whole model; that of a few of its layers while its device has no room for all."""
        mine = (self.job.model, self.job.role, self.fingerprint, self.threads, self.digest)
        whole = find_profile(store, build_profile_key(*mine))
        if whole is not None or not self.job.may_cut:
            return whole
        few = find_profile(store, build_profile_key(*mine, few=True))
        return few if few is not None and few.planned_bytes > self._find_room_bytes() else None

    def _find_room_bytes(self) -> int:
        """Return what may be filled of its device: what is stated, else what is free now where the device is here."""
        if self.job.room_bytes or self.node:
            return self.job.room_bytes
        return read_device_memory(find_device(self.job.model.adapter, self.job.model.device)).free_bytes

    def find_device_profile(self, store: ProfileStore) -> MeasuredDevice | None:
        mine = (self.fingerprint, self.job.model.adapter, self.threads)
        return next(
            (device for device in store.devices() if mine == (device.fingerprint, device.adapter, device.threads)), None
        )

    def assume_device(self) -> MeasuredDevice:
        """Return its device as if it had been measured, without rates. Raises AdapterUnavailable, Unsupported."""
        device = find_device(self.job.model.adapter, self.job.model.device)
        version = runtime_version(device.adapter)
        return MeasuredDevice(self.fingerprint, device.adapter, device.name, version, hardware(device), self.threads)

    def texts(self, store: ProfileStore) -> TargetTexts | None:
        target = find_source_digest(self.job.engine.model)
        mine = (target, CHAT_WORKLOAD)
        return next((text for text in store.texts() if mine == (text.target_digest, text.workload)), None)

    def pair(self, store: ProfileStore) -> PairAcceptance | None:
        mine = (find_source_digest(self.job.engine.model), self.job.drafter, self.digest, CHAT_WORKLOAD)
        named = (
            ((pair.target_digest, pair.drafter, pair.drafter_digest, pair.workload), pair) for pair in store.pairs()
        )
        return next((pair for name, pair in named if name == mine), None)


def profile_store(config: ClusterConfig) -> ProfileStore:
    return profiles_in(store_directory(config))


def list_work(config: ClusterConfig, base: Path, wanted: Sequence[str] = (), threads: Sequence[int] = ()) -> list[Work]:
    """Return what there is to measure, targets first: what drafts are worth is measured on what the target says.

    `wanted`: "RUNTIME" or "RUNTIME:DEVICE"; empty: all that are installed. `threads`: with each of these counts; empty:
    as configured. Raises Unsupported where a wanted one is not there, and what resolving the models raises.
    """
    engine = engine_options(config, base)
    sizes = _check_head(engine.model)
    # The configured runtime first: of the first one is also what the target says.
    devices = sorted(_on_devices(engine.model, wanted), key=lambda device: device.adapter != engine.model.adapter)
    named = (config.model.device, *(device.device for host in config.hosts for device in host.devices))
    devices = _keep_unlike(devices, named)
    if not devices:
        raise Unsupported(f"there is no runtime for {', '.join(wanted) or 'the model'} here; see outrider devices")
    work = []
    cuts = any(device.adapter in SHARDING_ADAPTERS for device in devices)  # else other runtimes are not looked at
    able = _list_cut_runtimes(config, engine.model, sizes) if cuts else ()
    for device in devices:
        for count in threads or (engine.model.threads,):
            model = engine.with_model(adapter=device.adapter, device=device.name, threads=count).model
            work.append(_work(ProfileJob(engine, model, "target", may_cut=device.adapter in able), device))
    own = [draft for host, draft in list_own_drafters(engine, config) if host in ("", THIS_NODE)]
    known: list[ModelOptions] = []  # several replicas may have a draft
    for draft in (*engine.drafters, *own):
        if isinstance(draft, ModelDraftOptions):
            for place in _keep_unlike(_places(draft, wanted), (draft.model.device, *named)):
                moved = msgspec.structs.replace(draft.model, adapter=place.adapter, device=place.name)
                if moved not in known:
                    known.append(moved)
                    work.append(_work(ProfileJob(engine, moved, "draft", drafter=draft.name), place))
    return work


def describe_drafts_elsewhere(config: ClusterConfig) -> list[str]:
    """Return in a line each whose drafts are not measured here, as their replica is bound to another host."""
    return [
        f"{format_place(config.find_place('model', 'replicas', number, 'drafts'))}: they are not measured here; "
        f"measure them on {placement.host}"
        for number, placement in enumerate(config.model.placements)
        if placement.own_drafts and placement.host not in ("", THIS_NODE)
    ]


def list_unfit(config: ClusterConfig, base: Path) -> dict[str, str]:
    """Return why runtimes of ours do not run the target here, by their names: those that a plan chooses from. Raises
    what resolving the model raises."""
    source, reasons = config.model.source, {}
    if source.startswith(SIMULATED_PREFIX) or config.model.adapter != AUTO:
        return {}
    for name in (LLAMA_CPP, *CONVERTING_ADAPTERS):
        try:
            refuse_runtime(source, base, name)
        except ModelRefused as error:
            reasons[name] = str(error)
    return reasons


def is_requested(work: Work, config: ClusterConfig) -> bool:
    """Return whether a plan for this configuration may choose what a piece of work measures."""
    model = work.job.model
    if work.job.role != "target":
        return True
    adapter, device = config.model.adapter, config.model.device
    simulated = model.adapter == "simulated" and is_processor(device)
    return adapter in (AUTO, model.adapter) and (device == AUTO or is_same_device(device, model.device) or simulated)


def remote_work(
    config: ClusterConfig, base: Path, wanted: Sequence[str], threads: Sequence[int], nodes: Sequence[str]
) -> list[Work]:
    """Return the target on each of the wanted devices ("RUNTIME:DEVICE") of other nodes. Raises Unsupported for what is
    not named so, and where there is no cluster of several nodes."""
    if not config.cluster.across_hosts:
        raise Unsupported("--node goes with cluster.address, which this configuration has not")
    if not wanted or not all(":" in name for name in wanted):
        raise Unsupported("--node goes with --device RUNTIME:DEVICE: what other nodes have is not known here")
    engine = engine_options(config, base)
    work = []
    for name in wanted:
        adapter, device = _split_name(name)
        for count in threads or (engine.model.threads,):
            model = engine.with_model(adapter=adapter, device=device, threads=count).model
            job = ProfileJob(engine, model, "target")
            work += [Work(job, "", count, node) for node in nodes]
    return work


def predict_needed_bytes(work: Work, store: ProfileStore) -> int:
    """Return the memory that a piece of work is to take, with what is prepared for it. Raises what resolving its model
    raises."""
    known, model = work.find_model_profile(store), work.job.model
    if known is not None:
        return known.peak_bytes if known.few_layers else max(known.planned_bytes, known.peak_bytes)
    if model.source.startswith(SIMULATED_PREFIX):
        return _PROCESS_BYTES
    files = resolve(model.source, Path(model.base)).content
    return _PROCESS_BYTES + _MEMORY_PER_FILE * sum(path.stat().st_size for path in files)


def find_source_digest(options: ModelOptions) -> str:
    """Return the digest of a model's files; the simulated one has its script's. Raises ModelRefused."""
    return digest_at_hand(options.source, Path(options.base), Path(options.store), options.adapter)


def _check_head(model: ModelOptions) -> DecoderSizes | None:
    """Return a model's sizes; None for the simulated one. Raises what resolving it raises."""
    if model.source.startswith(SIMULATED_PREFIX):
        return None
    return check_model(resolve(model.source, Path(model.base)), AUTO)


def _list_cut_runtimes(config: ClusterConfig, model: ModelOptions, sizes: DecoderSizes | None) -> tuple[str, ...]:
    """Return the runtimes whose layers a plan may spread over devices of this machine, or over hosts."""
    whole = sizes is not None and sizes.whole
    if whole or config.placement.sharding == "never" or model.tensor_parallel > 1:
        return ()
    own = CONVERTING_ADAPTERS if sizes is not None else ("simulated",)
    able = tuple(name for name in own if config.model.adapter in (AUTO, name))
    if config.cluster.address:
        return able
    here: set[tuple[Hardware, str]] = set()
    for name in able if config.model.device == AUTO else ():
        with suppress(AdapterUnavailable):
            here |= {(hardware(device), number_unit(device.name)) for device in registry.list_devices(name)}
    return able if len(here) > 1 else ()


def _keep_unlike(devices: Sequence[DeviceProfile], named: Sequence[str]) -> list[DeviceProfile]:
    """Return one of those that are alike to their runtime: the first that is `named`, else the first. What is measured
    of it holds for all."""
    kinds: dict[tuple[str, Hardware], DeviceProfile] = {}
    for device in sorted(devices, key=lambda device: not any(is_same_device(device.name, name) for name in named)):
        kinds.setdefault((device.adapter, hardware(device)), device)
    return [device for device in devices if kinds[device.adapter, hardware(device)] is device]


def _work(job: ProfileJob, device: DeviceProfile) -> Work:
    return Work(job, mark_of(device), threads_of(job.model, device))


def _on_devices(model: ModelOptions, wanted: Sequence[str]) -> Iterator[DeviceProfile]:
    """Yield the devices of all runtimes that run a model here, whose head is whole."""
    simulated = model.source.startswith(SIMULATED_PREFIX)
    for name in registry.names():
        named = any(text.partition(":")[0] == name for text in wanted)
        goes_with = named or not simulated if name not in OWN_ADAPTERS else (name == "simulated") == simulated
        if not goes_with or (wanted and not named):
            continue
        try:
            if not simulated:
                refuse_runtime(model.source, Path(model.base), name)
            devices = registry.list_devices(name)
        except (AdapterUnavailable, ModelRefused) as error:
            if named:
                raise Unsupported(str(error)) from error
            continue
        yield from (device for device in devices if _is_wanted(device, wanted))


def _places(draft: ModelDraftOptions, wanted: Sequence[str]) -> list[DeviceProfile]:
    """Return where a draft may run: where it is configured to, or wherever its `auto` allows."""
    adapter, device = draft.model.adapter, draft.model.device
    if AUTO not in (adapter, device):
        try:
            places = registry.list_devices(adapter)
        except AdapterUnavailable:
            return []
        place = find_listed_device(places, effective_device(adapter, device))
        return [place] if place is not None and _is_wanted(place, wanted) else []
    _check_head(draft.model)
    return [
        place
        for place in _on_devices(draft.model, wanted)
        if adapter in (AUTO, place.adapter) and (device == AUTO or is_same_device(device, place.name))
    ]


def _is_wanted(device: DeviceProfile, wanted: Sequence[str]) -> bool:
    named = [name for adapter, name in map(_split_name, wanted) if adapter == device.adapter]
    return not wanted or any(not name or is_same_device(name, device.name) for name in named)


def _split_name(wanted: str) -> tuple[str, str]:
    """Return the runtime and the device of "RUNTIME:DEVICE", "" where no device is named."""
    adapter, _, device = wanted.partition(":")
    return adapter, normalise_device(adapter, device)


@contextmanager
def measuring_alone(store: ProfileStore, busy: OutriderError | None = None) -> Iterator[None]:
    """Let nobody else measure with this store meanwhile. Raises `busy` where somebody does, or PlanError."""
    store.directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(store.directory / _MEASURING_LOCK, timeout=0):
            yield
    except Timeout:
        why = f"somebody is measuring with {store.directory} already; start again when that is done"
        raise busy or PlanError(why) from None
