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
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.device_names import split_device
from orchestrator.config.access_checks import check_access
from orchestrator.config.adapter_names import INSTALLED
from orchestrator.config.cluster_checks import check_cluster, check_cluster_hosts, check_names
from orchestrator.config.drafts import EndpointDraft, HeadDraft, IndexDraft, ModelDraft
from orchestrator.config.endpoint_checks import check_key_file
from orchestrator.config.hosts import check_hosts
from orchestrator.config.keys_file import read_keys
from orchestrator.config.lora_checks import check_loras
from orchestrator.config.model import ClusterConfig
from orchestrator.config.runtimes import check_runtimes, use_runtimes
from orchestrator.config.socket_place import USUAL_PLACES, choose_socket, find_config_path
from orchestrator.config.source_text import Lines, Place, SourceFile, format_place, parse_text, read_text
from orchestrator.config.target import AUTO, Target
from orchestrator.config.target_checks import (
    check_canary,
    check_drafts,
    check_residency,
    check_speculation,
    check_target,
    list_split,
)
from orchestrator.config.tracing import check_tracing
from orchestrator.config.wording import problems
from orchestrator.errors import ConfigError
from policies.models.quantization import AS_FILE

_NAME_BYTES = 8
_ON_ALL_HOSTS = " This host needs the model at the same place as the hosts that run it: the daemon translates text."


def load_config(path: Path, *, sources: bool = True, present: bool = True) -> ClusterConfig:
    """Read and check a cluster.yaml. Raises ConfigError, one line a problem.

    `sources=False` leaves out the model's files and the keys: whoever asks a running daemon does not need them.
    `present=False`: its hosts need not be there. Libraries of runtimes that it names are this process's from then on.
    """
    config, lines = parse_config(read_text(path), path)
    if sources:
        check_runtimes(config.adapters, SourceFile(path, lines))
    use_runtimes(config.adapters, path.resolve().parent)
    return check_config(config, path, lines, sources=sources, present=present)


def load_text(text: str, path: Path, *, sources: bool = True, present: bool = True) -> ClusterConfig:
    """Return the configuration that a text is, checked as `load_config` does. Raises ConfigError."""
    config, lines = parse_config(text, path)
    return check_config(config, path, lines, sources=sources, present=present)


def check_config(
    config: ClusterConfig, path: Path, lines: Lines, *, sources: bool = True, present: bool = True
) -> ClusterConfig:
    """Find what contradicts itself in a configuration, or cannot be on this machine. Returns it without the drafts of
    models that can have none, where `sources` are looked at. Raises ConfigError."""
    file = SourceFile(path, lines)
    decoders: list[DecoderSizes | None] = []
    check_hosts(config.hosts, config.links, file)
    check_names(config, file)
    if sources:
        for target in config.targets:
            decoders.append(_check_sources(target, file))
            check_speculation(target, file)
        check_canary(config, file)
        for target in config.targets:
            check_drafts(target, file)
            check_residency(target, file)
        check_runtimes(config.adapters, file)
        check_cluster(config, file)
        if present:
            check_cluster_hosts(config, file)
        for target, decoder in zip(config.targets, decoders, strict=True):
            check_target(target, decoder, file)
            check_loras(target, file)
        check_access(config.api, file)
        if config.api.keys_file:
            try:
                read_keys(file.resolve(config.api.keys_file))
            except ConfigError as error:
                raise file.refuse(("api", "keys_file"), error) from error
        check_tracing(config.tracing, file)
    return config.without_drafts(
        {number: why for number, decoder in enumerate(decoders) if (why := explain_no_drafts(decoder))}
    )


def list_draft_notes(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line for each target that has drafts in the file, and is served without them."""
    configured = (config.drafts, *(model.drafters for model in config.models))
    notes = []
    for drafts, target in zip(configured, config.targets, strict=True):
        if drafts and target.no_drafts:
            place = target.find_place("drafts")
            line = lines.get(place) or lines.get(target.find_place("model", "source"), 1)
            why = f"left off: {target.no_drafts}. {target.model.source} is served without drafts"
            notes.append(f"{path}:{line}: {format_place(place)}: {why}")
    return notes


def default_config_path() -> Path:
    """Return ./cluster.yaml or /etc/outrider/cluster.yaml. Raises ConfigError when neither is there."""
    path = find_config_path()
    if path is None:
        raise ConfigError(f"no configuration: write {USUAL_PLACES[0]} or name one with --config")
    return path


def load_or_default(path: Path | None) -> ClusterConfig:
    """Return the configuration of this file, or of the usual places; where there is none the defaults, with a model
    that nobody serves. For what asks of ports and directories alone. Raises ConfigError."""
    file = path or find_config_path()
    if file is None:
        return ClusterConfig(model=Target(source=f"{SIMULATED_PREFIX}toy", adapter="simulated"))
    return load_config(file, sources=False)


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


def _check_sources(config: ClusterConfig, file: SourceFile) -> DecoderSizes | None:
    """Find the files of models, stores and statistics now, so that a wrong source is told with its line. Return the
    target's sizes, None where that is not known here. Raises ConfigError."""
    target, place = config.model, config.find_place("model", "source")
    sources: list[tuple[Place, str, str, Target | ModelDraft]] = [(place, target.source, target.adapter, target)]
    others = [
        ((*at, "shards", number), shard.adapter)
        for at, model in list_split(config)
        for number, shard in enumerate(model.shards)
    ]
    others += [(at, own.adapter or "") for at, own in config.own_targets]
    for at, adapter in others:
        if adapter:
            sources.append(((*at, "adapter"), target.source, adapter, target))
    for at, draft in config.all_drafts:
        if isinstance(draft, ModelDraft):
            sources.append(((*at, "source"), draft.source, draft.adapter, draft))
        elif isinstance(draft, IndexDraft):
            _check_index(at, draft, file)
        elif isinstance(draft, EndpointDraft):
            _check_endpoint(at, draft, file)
        elif isinstance(draft, HeadDraft):
            continue  # with the target's shape, once that is known
        elif draft.statistics not in ("auto", "none") and not (path := file.resolve(draft.statistics)).is_file():
            why = f"{path} is no file; make it with `outrider drafts build`, or write auto or none"
            raise file.refuse((*at, "statistics"), why)
    decoder: DecoderSizes | None = None
    for place, source, adapter, model in sources:
        sizes = _check_source(config, file, place, source, adapter, model)
        if decoder is None and model is target:
            decoder = sizes
    return decoder


def _check_source(
    config: ClusterConfig, file: SourceFile, place: Place, source: str, adapter: str, model: Target | ModelDraft
) -> DecoderSizes | None:
    """Return a model's sizes, None where they are not known here. Raises ConfigError."""
    simulated = source.startswith(SIMULATED_PREFIX)
    if adapter in OWN_ADAPTERS and simulated != (adapter == "simulated"):
        way_out = "the adapter 'simulated' takes 'simulated:toy' and nothing else does"
        raise file.refuse(place, f"{source!r} does not go with adapter {adapter!r}; {way_out}")
    if simulated:
        return None
    elsewhere = config.cluster.across_hosts and not source.startswith(HUB_PREFIX)
    chosen = "" if elsewhere and adapter == AUTO else adapter
    static, draft = model.static_shapes == "on" or split_device(model.device)[0] == "npu", isinstance(model, ModelDraft)
    try:
        sizes = check_source(source, file.base, chosen, static=static, draft=draft)
    except ModelRefused as error:
        if elsewhere and isinstance(error, WrongLibrary):
            return None  # the hosts that run it have libraries of their own, and say so when they load it
        raise file.refuse(place, f"{error}{_ON_ALL_HOSTS if elsewhere else ''}") from error
    if sizes is not None and sizes.fixed_formats and model.weights not in (AUTO, AS_FILE):
        raise file.refuse(
            (*place[:-1], "weights"), f"{source} brings its own graph, which is run as it is; leave this out"
        )
    return sizes


def _check_endpoint(at: Place, draft: EndpointDraft, file: SourceFile) -> None:
    check_key_file(at, draft.api_key_file, file)
    translates = draft.mismatched_vocabulary == "translate"
    if draft.source and not translates:
        why = "is for its tokenizer; set mismatched_vocabulary: translate, or leave the key out"
        raise file.refuse((*at, "source"), why)
    if translates and not draft.source:
        why = "needs the server's tokenizer; name a model that has it as source"
        raise file.refuse((*at, "mismatched_vocabulary"), why)


def _check_index(at: Place, draft: IndexDraft, file: SourceFile) -> None:
    path = file.resolve(draft.path)
    if not path.is_file():
        raise file.refuse((*at, "path"), f"{path} is no file; make it with `outrider drafts index DIR`")
    if (size := path.stat().st_size) > draft.memory:
        raise file.refuse((*at, "memory"), f"the store has {size} bytes; raise it, or index fewer documents")
