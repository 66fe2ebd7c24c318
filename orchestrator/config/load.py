"""Reads cluster.yaml. Every problem is one line: file:line, the key, what is wrong, the way out."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import platformdirs
from pydantic import ValidationError

from adapters.contract import ModelRefused
from adapters.decoder.spec import DecoderSizes
from adapters.distributions import list_foreign
from adapters.hf_hub import HUB_PREFIX
from adapters.llama_cpp.library import WrongLibrary
from adapters.model_checks import explain_no_drafts
from adapters.model_source import check_source
from adapters.names import OWN_ADAPTERS
from adapters.vocabulary import vocabulary_at_hand
from orchestrator.config.access_checks import check_access
from orchestrator.config.adapter_names import INSTALLED
from orchestrator.config.cluster_checks import check_cluster, check_cluster_hosts
from orchestrator.config.draft_store import check_stores
from orchestrator.config.drafts import DraftWorkersSection, IndexDraft, ModelDraft, SuffixDraft
from orchestrator.config.further_checks import check_names, check_own_placement
from orchestrator.config.hosts import check_hosts
from orchestrator.config.keys_file import keys_path, read_keys
from orchestrator.config.layer_checks import check_device_layers
from orchestrator.config.model import ClusterConfig
from orchestrator.config.replica_checks import check_bounds, list_placements
from orchestrator.config.runtimes import check_runtimes, use_runtimes
from orchestrator.config.shard_checks import ONLY_ON_RAY, check_shards
from orchestrator.config.socket_place import USUAL_PLACES, choose_socket, find_config_path
from orchestrator.config.source_text import Lines, Place, describe_place, format_place, parse_text, read_text
from orchestrator.config.target import AUTO, Target
from orchestrator.config.tensor_checks import check_tensor_parallel
from orchestrator.config.tracing import check_tracing
from orchestrator.config.wording import problems
from orchestrator.errors import ConfigError
from policies.models.vocabulary import Match, compare, refusal

SIMULATED_PREFIX = "simulated:"
_NAME_BYTES = 8
_OF_OWN_PROCESS = {"host", "cores", "overlap", "max_wait_ms", "answer_timeout_s", "workers"}


def load_config(path: Path, *, sources: bool = True, there: bool = True) -> ClusterConfig:
    """Read and check a cluster.yaml. Raises ConfigError, one line a problem.

    `sources=False` leaves out the model's files and the keys: whoever asks a running daemon does not need them.
    `there=False`: its hosts need not be there. Libraries of runtimes that it names are this process's from then on.
    """
    config, lines = parse_config(read_text(path), path)
    if sources:
        check_runtimes(config.adapters, path, lines)
    use_runtimes(config.adapters, path.resolve().parent)
    return check_config(config, path, lines, sources=sources, there=there)


def load_text(text: str, path: Path, *, sources: bool = True, there: bool = True) -> ClusterConfig:
    """Return the configuration that a text is, checked as `load_config` does. Raises ConfigError."""
    config, lines = parse_config(text, path)
    return check_config(config, path, lines, sources=sources, there=there)


def check_config(
    config: ClusterConfig, path: Path, lines: Lines, *, sources: bool = True, there: bool = True
) -> ClusterConfig:
    """Find what contradicts itself in a configuration, or cannot be on this machine. Returns it without the drafts of
    models that can have none, where `sources` are looked at. Raises ConfigError."""
    decoders: list[DecoderSizes | None] = []
    check_hosts(config.hosts, config.links, path, lines)
    check_names(config, path, lines)
    if sources:
        for target in config.targets:
            decoders.append(_check_sources(target, path, lines))
            _check_depths(target, path, lines)
            _check_tolerance(target, path, lines)
        _check_canary(config, path, lines)
        for target in config.targets:
            _check_processes(target, path, lines)
            _check_stores(target, path, lines)
        check_runtimes(config.adapters, path, lines)
        check_cluster(config, path, lines)
        if there:
            check_cluster_hosts(config, path, lines)
        for target, decoder in zip(config.targets, decoders, strict=True):
            _check_replicas(target, path, lines)
            _check_cores(target, path, lines)
            _check_objectives(target, path, lines)
            _check_vocabularies(target, path, lines)
            check_own_placement(target, path, lines)
            check_shards(target, decoder, path, lines)
            check_tensor_parallel(target, decoder, path, lines)
            check_device_layers(target, path, lines)
        check_access(config.api, path, lines)
        _check_keys(config, path, lines)
        check_tracing(config.tracing, path, lines)
    return config.without_drafts(
        {number: why for number, one in enumerate(decoders) if (why := explain_no_drafts(one))}
    )


def list_draft_notes(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line for each target that has drafts in the file, and is served without them."""
    configured = (config.drafts, *(one.drafters for one in config.models))
    notes = []
    for drafts, target in zip(configured, config.targets, strict=True):
        if drafts and target.no_drafts:
            place = target.find_place("drafts")
            line = lines.get(place) or lines.get(target.find_place("model", "source"), 1)
            told = (
                f"{format_place(place)}: left off: {target.no_drafts}. {target.model.source} is served without drafts"
            )
            notes.append(f"{path}:{line}: {told}")
    return notes


def default_config_path() -> Path:
    """Return ./cluster.yaml or /etc/outrider/cluster.yaml. Raises ConfigError when neither is there."""
    found = find_config_path()
    if found is None:
        raise ConfigError(f"no configuration: write {USUAL_PLACES[0]} or name one with --config")
    return found


def load_or_default(path: Path | None) -> ClusterConfig:
    """Return the configuration of this file, or of the usual places; where there is none the defaults, with a model
    that nobody serves. For what asks of ports and directories alone. Raises ConfigError."""
    found = path or find_config_path()
    if found is None:
        return ClusterConfig(model=Target(source=f"{SIMULATED_PREFIX}toy", adapter="simulated"))
    return load_config(found, sources=False)


def admin_socket_path(config: ClusterConfig, port: int) -> Path:
    """Return the admin socket's path: as configured, else in the user's runtime directory, by port.

    Raises ConfigError when there is no runtime directory and none can be made that is safe from other users.
    """
    return choose_socket(config.api.admin_socket, port)


def store_directory(config: ClusterConfig) -> Path:
    """Return where prepared models are kept."""
    if config.store.directory:
        return Path(config.store.directory).expanduser()
    directory = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return Path(directory) if directory else Path(platformdirs.user_cache_dir("outrider"))


def state_directory(config: ClusterConfig, path: Path) -> Path:
    """Return what belongs to one daemon of the configuration in the file `path`."""
    if config.state.directory:
        return Path(config.state.directory).expanduser()
    directory = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    every = Path(directory) if directory else Path(platformdirs.user_state_dir("outrider"))
    served = f"{path.resolve()}\n{config.api.host}\n{config.api.port}"
    return every / f"daemon-{blake2b(served.encode(), digest_size=_NAME_BYTES).hexdigest()}"


def parse_config(text: str, path: Path) -> tuple[ClusterConfig, Lines]:
    """Return the configuration that a text is, and the line of each value. Raises ConfigError."""
    data, lines = parse_text(text, path)
    try:
        return ClusterConfig.model_validate(data, context={INSTALLED: list_foreign}), lines
    except ValidationError as error:
        raise ConfigError(problems(error, path, lines)) from error


_ON_ALL_HOSTS = " This host needs the model at the same place as the hosts that run it: the daemon translates text."


def _check_sources(config: ClusterConfig, path: Path, lines: Lines) -> DecoderSizes | None:
    """Find the models' files now, so that a wrong source is told with its line. Return the target's sizes, None where
    that is not known here. Raises ConfigError."""
    own = (config.find_place("model", "source"), config.model.source, config.model.adapter, config.model)
    sources: list[tuple[Place, str, str, Target | ModelDraft]] = [own]
    for index, shard in enumerate(config.model.shards):
        if shard.adapter:
            place = config.find_place("model", "shards", index, "adapter")
            sources.append((place, own[1], shard.adapter, config.model))
    for index, standby in enumerate(config.failover.standby):
        if standby.adapter:
            place = config.find_place("failover", "standby", index, "adapter")
            sources.append((place, own[1], standby.adapter, config.model))
    for at, draft in config.all_drafts:
        if isinstance(draft, ModelDraft):
            sources.append(((*at, "source"), draft.source, draft.adapter, draft))
    _check_indexes(config, path, lines)
    _check_statistics(config, path, lines)
    decoder: DecoderSizes | None = None
    for place, source, adapter, model in sources:
        where = describe_place(path, lines, place)
        found = _check_source(config, path, where, source, adapter, model)
        if decoder is None and model is config.model:
            decoder = found
    return decoder


def _check_source(
    config: ClusterConfig, path: Path, where: str, source: str, adapter: str, model: Target | ModelDraft
) -> DecoderSizes | None:
    """Return a model's sizes, None where they are not known here. Raises ConfigError, which begins with `where`."""
    simulated = source.startswith(SIMULATED_PREFIX)
    if adapter in OWN_ADAPTERS and simulated != (adapter == "simulated"):
        raise ConfigError(
            f"{where} {source!r} does not go with adapter {adapter!r}; "
            "the adapter 'simulated' takes 'simulated:toy' and nothing else does"
        )
    if simulated:
        return None
    elsewhere = bool(config.cluster.on_ray and config.cluster.address) and not source.startswith(HUB_PREFIX)
    chosen = "" if elsewhere and adapter == AUTO else adapter
    static, draft = model.static_shapes == "on" or model.device.startswith("NPU"), isinstance(model, ModelDraft)
    try:
        return check_source(source, path.resolve().parent, chosen, static=static, draft=draft)
    except ModelRefused as error:
        if elsewhere and isinstance(error, WrongLibrary):
            return None  # the hosts that run it have libraries of their own, and say so when they load it
        raise ConfigError(f"{where} {error}{_ON_ALL_HOSTS if elsewhere else ''}") from error


def _check_indexes(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Find the stores of documents, so that a wrong path is told with its line. Raises ConfigError."""
    for at, draft in config.all_drafts:
        if not isinstance(draft, IndexDraft):
            continue
        file = path.resolve().parent / Path(draft.path).expanduser()
        if not file.is_file():
            where = describe_place(path, lines, (*at, "path"))
            raise ConfigError(f"{where} {file} is no file; make it with `outrider drafts index DIR`")
        if (size := file.stat().st_size) > draft.memory:
            place = (*at, "memory")
            where = f"{path}:{lines.get(place, lines.get((*at, 'path'), 1))}: {format_place(place)}:"
            raise ConfigError(f"{where} the store has {size} bytes; raise it, or index fewer documents")


def _check_statistics(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Find statistics that are named, so that a wrong path is told with its line. Raises ConfigError."""
    for at, draft in config.all_drafts:
        if not isinstance(draft, SuffixDraft) or draft.statistics in ("auto", "none"):
            continue
        file = path.resolve().parent / Path(draft.statistics).expanduser()
        if not file.is_file():
            where = describe_place(path, lines, (*at, "statistics"))
            raise ConfigError(f"{where} {file} is no file; make it with `outrider drafts build`, or write auto or none")


def _check_depths(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse a least depth above the most. Raises ConfigError."""
    speculation, pid = config.speculation, config.speculation.pid
    most = ("num_speculative_tokens", speculation.num_speculative_tokens)
    deepest = ("pid.max_depth", pid.max_depth) if pid.max_depth else most
    bounds: list[tuple[Place, int, tuple[str, int]]] = [
        (("min_speculative_tokens",), speculation.min_speculative_tokens, most),
        (("pid", "max_depth"), pid.max_depth, most),
        (("pid", "min_depth"), pid.min_depth if "min_depth" in pid.model_fields_set else 0, deepest),
    ]
    for key, depth, (bound, limit) in bounds:
        if depth > limit:
            place = config.find_place("speculation", *key)
            at = f"{path}:{lines.get(place, 1)}: {format_place(place)}"
            raise ConfigError(f"{at}: {depth} is above {format_place(place[: -len(key)])}.{bound}, which is {limit}")


def _check_tolerance(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse keys of a tolerance that is learned where one is fixed: they would change nothing. Raises ConfigError."""
    speculation = config.speculation
    if not speculation.tolerance_delta:
        return
    for name in ("tolerance_acceptance_rate", "tolerance_warmup_tokens", "tolerance_max_delta"):
        if name in speculation.model_fields_set:
            place = config.find_place("speculation", name)
            where = describe_place(path, lines, place)
            raise ConfigError(
                f"{where} is of a tolerance that is learned, and tolerance_delta fixes it; leave one of them out"
            )


def _check_processes(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse keys that would change nothing. Raises ConfigError."""
    for at, draft in config.all_drafts:
        if not isinstance(draft, ModelDraft):
            continue
        for key in sorted(draft.model_fields_set & _OF_OWN_PROCESS):
            where = describe_place(path, lines, (*at, key))
            if draft.process == "target":
                raise ConfigError(f"{where} goes with process: own; add that, or leave the key out")
            if key == "host" and draft.host and not config.cluster.on_ray:
                raise ConfigError(f"{where} {ONLY_ON_RAY}")
            if key == "workers":
                _check_draft_workers(draft.workers, where)


def _check_stores(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse draft stores that cannot be used. Raises ConfigError."""
    found = [
        (at, draft.store, draft.store_options if "store_options" in draft.model_fields_set else None)
        for at, draft in config.all_drafts
        if isinstance(draft, SuffixDraft)
    ]
    check_stores(found, path, lines)


def _check_draft_workers(workers: DraftWorkersSection, where: str) -> None:
    """Refuse bounds that contradict each other, and keys that would change nothing. Raises ConfigError."""
    if workers.max and not workers.min:
        raise ConfigError(f"{where} max goes with min, which is 0: one for each replica; set min, or leave max out")
    if workers.max and workers.max < workers.min:
        raise ConfigError(f"{where} max must be at least min, which is {workers.min}")
    if "idle_s" in workers.model_fields_set and workers.max <= workers.min:
        raise ConfigError(f"{where} idle_s goes with a max above min; set that, or leave the key out")


def _check_canary(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse a canary that is no other than the rest, and what cannot be tried that way. Raises ConfigError."""
    canary = config.canary
    where = describe_place(path, lines, ("canary",))
    _check_canary_places(config, path, lines)
    if not canary.share:
        return
    if canary.least_requests > canary.most_requests:
        raise ConfigError(
            f"{path}:{lines.get(('canary', 'most_requests'), lines.get(('canary',), 1))}: canary.most_requests: "
            f"must be at least least_requests, which is {canary.least_requests}"
        )
    ours, theirs = config.speculation, config.canary_speculation
    off = theirs.method == "off" or not theirs.num_speculative_tokens
    if off and canary.drafts:
        raise ConfigError(f"{where} its drafts are never asked where its speculation is off; leave one of them out")
    if off and (ours.method == "off" or not ours.num_speculative_tokens or not config.drafts):
        raise ConfigError(f"{where} speculation is off for everybody; give the canary a speculation.method")
    if not off and not canary.drafts and not config.drafts:
        raise ConfigError(f"{where} nobody has a drafter; give it canary.drafts")
    if ours == theirs and not config.canary_drafts:
        raise ConfigError(
            f"{where} is no other than the rest; set canary.drafts, canary.speculation.method, "
            "canary.speculation.num_speculative_tokens or canary.speculation.acceptance, or share: 0"
        )


def _check_canary_places(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse a drafter that only the canary has and that no plan places: plans are made for the others. Raises
    ConfigError."""
    off = config.speculation.method == "off" or not config.speculation.num_speculative_tokens
    shared = bool(config.canary.share) and not config.canary.drafts and off  # nobody else has them loaded
    for at, draft in config.all_drafts:
        for key in ("adapter", "device"):
            mine = at[0] == "canary" or shared
            if mine and isinstance(draft, ModelDraft) and getattr(draft, key) == AUTO:
                place = (*at, key)
                raise ConfigError(f"{describe_place(path, lines, place)} no plan chooses for it; name one")


def _check_replicas(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse what one replica can have and several cannot, and hosts that are none. Raises ConfigError."""
    check_bounds(config, path, lines)
    placements = list_placements(config)
    if config.devices.cores and (config.model.most_replicas > 1 or any(one.cores for _, one in placements)):
        mine, replicas = config.find_place("devices", "cores"), config.find_place("model", "replicas")
        raise ConfigError(
            f"{describe_place(path, lines, mine)} are one worker's; "
            f"give each replica its own in {format_place(replicas)}, as in [{{cores: [0, 1]}}, {{cores: [2, 3]}}]"
        )
    for at, placement in placements:
        if placement.host and not config.cluster.on_ray:
            place: Place = (*at, "host")
            raise ConfigError(f"{describe_place(path, lines, place)} {ONLY_ON_RAY}")


def _check_cores(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse cores that are named twice, or that this host lacks where workers run on it. Raises ConfigError."""
    named: list[tuple[Place, list[int]]] = [(config.find_place("devices", "cores"), config.devices.cores)]
    named += [((*at, "cores"), one.cores) for at, one in list_placements(config)]
    named += [((*at, "cores"), draft.cores) for at, draft in config.all_drafts if isinstance(draft, ModelDraft)]
    here = not config.cluster.on_ray or not config.cluster.address
    usable = os.sched_getaffinity(0) if here and hasattr(os, "sched_getaffinity") else None
    for place, cores in named:
        where = describe_place(path, lines, place)
        if len(set(cores)) < len(cores):
            raise ConfigError(f"{where} names a core twice")
        if usable is not None and (missing := sorted(set(cores) - usable)):
            raise ConfigError(
                f"{where} this machine has no core {missing[0]} for workers; it has "
                f"{', '.join(map(str, sorted(usable)))}"
            )


def _check_objectives(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Refuse keys that would change nothing: those of an objective that is not set. Raises ConfigError."""
    needs = {"ttft_percentile": "ttft_ms", "late": "ttft_ms", "tpot_percentile": "tpot_ms"}
    for key, needed in needs.items():
        if key in config.slo.model_fields_set and not getattr(config.slo, needed):
            place = config.find_place("slo", key)
            where = describe_place(path, lines, place)
            raise ConfigError(f"{where} goes with slo.{needed}; set that, or leave the key out")


def _check_vocabularies(config: ClusterConfig, path: Path, lines: Lines) -> None:
    """Compare the drafts' vocabularies with the target's, where both models are at hand. Raises ConfigError."""
    wary = [
        (at, draft)
        for at, draft in config.all_drafts
        if isinstance(draft, ModelDraft) and draft.mismatched_vocabulary == "refuse"
    ]
    base = path.resolve().parent
    ours = vocabulary_at_hand(config.model.source, base) if wary else None
    for at, draft in wary:
        place: Place = (*at, "source")
        where = describe_place(path, lines, place)
        try:
            theirs = vocabulary_at_hand(draft.source, base, ours) if ours is not None else None
        except ModelRefused as error:
            raise ConfigError(f"{where} {error}") from error
        if ours is None or theirs is None:
            continue  # the worker compares them when it has them
        found = compare(ours, theirs)
        if found.match is Match.DIFFERS:
            raise ConfigError(f"{where} {refusal(draft.source, found)}")


def _check_keys(config: ClusterConfig, path: Path, lines: Lines) -> None:
    if config.api.keys_file:
        try:
            read_keys(keys_path(config.api.keys_file, path.resolve().parent))
        except ConfigError as error:
            raise ConfigError(f"{describe_place(path, lines, ('api', 'keys_file'))} {error}") from error
