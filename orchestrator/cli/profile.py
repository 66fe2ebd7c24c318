"""`outrider profile`: measures what the configured models cost on the devices that are here, and keeps it."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapters.contract import silent
from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.link import LinkProfile
from device_profiles.measured import MeasuredDevice, MeasuredModel
from device_profiles.profile import Precision
from device_profiles.roofline import roofline
from device_profiles.store import ProfileStore
from device_profiles.units import GIB, MS_PER_S, human_bytes
from orchestrator.cli.options import AsJson, ConfigFile, print_json
from orchestrator.errors import OutriderError, WorkerError
from orchestrator.plain_table import print_lines, print_table
from orchestrator.worker.measuring.canary_aside import leave_out_canary
from policies.planning.shard_cost import PREFILL_CHUNK_ROWS

if TYPE_CHECKING:
    from orchestrator.config.model import ClusterConfig
    from orchestrator.planning.profiling.work import Work
    from orchestrator.protocol.contract import Cluster
    from orchestrator.protocol.measuring import Finding

_Show = Callable[[str, float], None]
_MODEL_COLUMNS = "models|runtime|role|model|class|1, 5, 16 rows|prefill|round|error|load|memory|bound"


class ProfileError(OutriderError):
    """Nothing can be measured as asked, or something of it failed."""


def profile(
    device: Annotated[
        list[str] | None,
        typer.Option(help="RUNTIME or RUNTIME:DEVICE, as in openvino_rt:CPU; may be repeated. Else all there are."),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads of the runtime; may be repeated. Else as configured.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(help="Measure on this node of cluster.address instead, on each --device; may be repeated."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long forwards of each model are measured; longer is more exact.")
    ] = 8.0,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what is stored already.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure although a daemon serves here.")] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Measure devices, the configured models on them, their drafts and the links between hosts, and keep it all."""
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.planning.profiling.work import (
        describe_drafts_elsewhere,
        list_work,
        measuring_alone,
        profile_store,
        remote_work,
    )

    path = config or default_config_path()
    loaded = leave_out_canary(load_config(path))
    store = profile_store(loaded)
    base = path.resolve().parent
    work: list[Work] = []
    for target in loaded.targets:
        if node:
            work += remote_work(target, base, device or (), threads or (), node)
        else:
            work += list_work(target, base, device or (), threads or ())
            for line in describe_drafts_elsewhere(target):
                print(f"outrider: {line}", file=sys.stderr)
    todo = [piece for piece in work if refresh or not piece.is_known(store)]
    serving = "" if force else _describe_daemon(loaded)
    if not serving:
        todo = [piece for piece in work if piece in todo or not piece.is_done(store)]
    across = bool(loaded.cluster.address)  # which nodes there are is known only there
    doubts = [f"{piece.title}: {why}: measured again" for piece in todo if (why := piece.describe_doubt(store))]
    started, measuring = time.perf_counter(), _Measuring(store, refresh, seconds)
    if todo or across or refresh or not store.links():
        if serving:
            raise ProfileError(serving)
        for line in doubts:
            print(f"outrider: {line}", file=sys.stderr)
        busy = ProfileError("another `outrider profile` is measuring with this store; wait for it to end")
        with measuring_alone(store, busy):
            asyncio.run(measuring.measure(loaded, todo))
    took_s = time.perf_counter() - started if measuring.values or measuring.failures else 0.0
    _show(work, store, took_s, as_json=as_json)
    if measuring.failures:
        raise ProfileError("\n".join(measuring.failures))


@dataclass(slots=True)
class _Measuring:
    """Measures into a store. `refresh`: what is stored is measured again. `steps_s`: how long forwards of a model are
    measured. `values`: how many were measured, `texts`: what the target says among them; `failures`: what failed."""

    store: ProfileStore
    refresh: bool
    steps_s: float
    values: int = 0
    texts: bool = False
    failures: list[str] = field(default_factory=list)

    async def measure(self, config: ClusterConfig, todo: list[Work]) -> None:
        """Measure models on this machine or on the nodes that were named, one after another, then links."""
        from orchestrator.daemon.bootstrap.clusters import local_cluster, measuring_cluster

        with _bars(len(todo) + 1) as bar:
            here = [piece for piece in todo if not piece.node]
            if here:
                async with _open_cluster(local_cluster()) as cluster:
                    await self._measure_models(cluster, here, bar)
            async with _open_cluster(measuring_cluster(config)) as cluster:
                await self._measure_models(cluster, [piece for piece in todo if piece.node], bar)
                await self._measure_links(cluster, bar("links"))

    async def _measure_models(self, cluster: Cluster, todo: list[Work], bar: Callable[[str], _Show]) -> None:
        from orchestrator.planning.profiling.run import Watch, measure_on_cluster

        for piece in todo:
            show = bar(piece.title)
            try:
                # Described when its turn comes: what was stored meanwhile is known to it.
                spec = piece.spec(self.store, refresh=self.refresh, steps_s=self.steps_s, texts_are_new=self.texts)
                await measure_on_cluster(cluster, spec, Watch(show, self._keep))
            except WorkerError as error:
                self.failures.append(f"{piece.title}: {error}")

    async def _measure_links(self, cluster: Cluster, show: _Show) -> None:
        from orchestrator.planning.profiling.run import Watch, measure_path
        from orchestrator.planning.profiling.work import echo_spec, name_of, paths, probe_spec

        known = set() if self.refresh else {(link.left, link.right) for link in self.store.links()}
        named = [((name_of(left), name_of(right)), left, right) for left, right in paths(await cluster.nodes())]
        todo = [path for path in named if path[0] not in known]
        watch = Watch(silent, self._keep)
        for number, (names, left, right) in enumerate(todo):
            show(" to ".join(names), number / len(todo))
            try:
                probe = partial(probe_spec, left=left, right=right)
                await measure_path(cluster, echo_spec(right, across=left != right), probe, watch)
            except WorkerError as error:
                self.failures.append(f"link {' to '.join(names)}: {error}")

    def _keep(self, value: Finding) -> None:
        self.store.save(value)
        self.values += 1
        self.texts |= isinstance(value, TargetTexts)


def _describe_daemon(config: ClusterConfig) -> str:
    """Return why nothing is to be measured where the configuration's daemon answers: its device would be measured at
    half its speed, and its streams would stall. "" where none does."""
    from orchestrator.cli.daemon_socket import ask_daemon_of

    answer = ask_daemon_of(config)
    if answer is None:
        return ""
    return (
        f"a daemon serves here ({answer['phase']}, {answer['streams']} streams): stop it, or measure beside it with "
        "--force"
    )


@asynccontextmanager
async def _open_cluster(cluster: Cluster) -> AsyncIterator[Cluster]:
    await cluster.open()
    try:
        yield cluster
    finally:
        await cluster.close()


@contextmanager
def _bars(count: int) -> Iterator[Callable[[str], _Show]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=float(count))
        titles: list[str] = []

        def begin(title: str) -> _Show:
            titles.append(title)
            done = len(titles) - 1

            def show(stage: str, fraction: float) -> None:
                part = min(1.0, max(0.0, fraction))
                shown.update(task, description=f"{title}: {stage}", completed=done + part)

            show("start", 0.0)
            return show

        yield begin


def _show(work: list[Work], store: ProfileStore, took_s: float, *, as_json: bool) -> None:
    devices = dict.fromkeys(piece.find_device_profile(store) for piece in work)
    models = [model for piece in work if (model := piece.find_model_profile(store)) is not None]
    digests = {model.model_digest for model in models}
    profiles: dict[str, list[Any]] = {
        "devices": [device for device in devices if device is not None],
        "models": models,
        "pairs": [pair for pair in store.pairs() if pair.target_digest in digests],
        "links": store.links(),
    }
    if as_json:
        plain = {name: list(map(dataclasses.asdict, values)) for name, values in profiles.items()}
        print_json({**plain, "took_s": took_s, "store": str(store.directory)})
    else:
        _print_profiles(profiles, took_s, store.directory)


def _print_profiles(profiles: dict[str, list[Any]], took_s: float, store: Path) -> None:
    devices, models = profiles["devices"], profiles["models"]
    tables = {
        "devices|runtime|device|threads|rates, GFLOP/s|memory|energy": map(_build_device_row, devices),
        _MODEL_COLUMNS: (_build_model_row(model, devices) for model in models),
        "drafts|drafter|depths|tokens in a round, by depth|drafting": map(_build_pair_row, profiles["pairs"]),
        "links|from|to|round trip|bandwidth": map(_build_link_row, profiles["links"]),
    }
    for names, lazy_rows in tables.items():
        title, *columns = names.split("|")
        if rows := list(lazy_rows):
            print_table(columns, rows, title=title, title_left=True)
    doubts = [
        f"{model.model} ({model.role}) on {model.adapter} {model.device}: {model.doubt}; predictions by it are "
        f"± {model.error:.0%}"
        for model in models
        if model.doubt
    ]
    spent = f"measured in {took_s:.0f} s" if took_s else "nothing was measured: all of it was stored"
    print_lines(*doubts, f"{spent}; kept in {store}", wraps=False)


def _build_device_row(device: MeasuredDevice) -> tuple[str, ...]:
    rates, energy = device.rates, device.energy
    return (
        f"{device.adapter} ({device.runtime_version})",
        f"{device.device}: {device.hardware.name}",
        f"{device.threads or ''}",
        ", ".join(f"{rate.precision} {rate.flops / 1e9:.0f}" for rate in rates.matmul) or "not measured",
        f"{rates.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
        f"{energy.idle_w:.0f} W idle" if energy.idle_w is not None else energy.reason,
    )


def _build_model_row(model: MeasuredModel, devices: list[MeasuredDevice]) -> tuple[str, ...]:
    planned = f" of {human_bytes(model.planned_bytes)} planned" if model.planned_bytes else ""
    return (
        f"{model.adapter} {model.device}" + (f", {model.threads} threads" if model.threads else ""),
        model.role,
        f"{model.model} {model.weights}, {model.exactness}",
        f"{model.numerical_class}; {model.class_fingerprint or 'not measured'}",
        f"{', '.join(f'{model.cost.ms(count):.1f}' for count in (1, 5, 16))} ms",
        f"{PREFILL_CHUNK_ROWS * MS_PER_S / model.cost.prefill_ms(PREFILL_CHUNK_ROWS):.0f} tok/s",
        f"+ {model.overhead.ms(1, 1):.2f} ms",
        f"{model.decode_error:.0%}, {model.prefill_error:.0%}",
        f"{model.load_s:.1f} s",
        f"{human_bytes(model.peak_bytes)}{planned}",
        _format_bound(model, devices),
    )


def _format_bound(model: MeasuredModel, devices: list[MeasuredDevice]) -> str:
    """Return what bounds a model's decoding, as people read it; empty where rates are not known."""
    mine = (model.fingerprint, model.adapter, model.threads)
    rates = next(
        (device.rates for device in devices if mine == (device.fingerprint, device.adapter, device.threads)), None
    )
    flops = rates.flops(Precision(model.activations)) if rates is not None and model.matrix_elements else 0.0
    if rates is None or not flops or not rates.bandwidth_bytes_per_s:
        return ""
    verdict = roofline(
        read_bytes=model.weights_bytes,
        matrix_elements=model.matrix_elements,
        flops=flops,
        bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s,
    )
    return f"{verdict.bound}; compute from depth {verdict.turns_at_depth}"


def _build_pair_row(pair: PairAcceptance) -> tuple[str, ...]:
    runtime = f" in {pair.adapter}" if pair.adapter else ""
    sequences = f", {pair.sequences} sequences" if pair.rule == "policy" else ""
    return (
        f"{pair.drafter} on {pair.target}, {pair.workload}, {pair.rule} depth{runtime}{sequences}",
        ", ".join(f"{figures.depth}" for figures in pair.by_depth),
        ", ".join(f"{figures.tokens:.2f}" for figures in pair.by_depth),
        f"{pair.draft_ms:.2f} ms" if pair.draft_ms else "",
    )


def _build_link_row(link: LinkProfile) -> tuple[str, ...]:
    return (link.left, link.right, f"{link.rtt_ms:.3f} ms", f"{link.bytes_per_s / GIB:.2f} GiB/s")
