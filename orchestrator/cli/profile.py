"""`outrider profile`: measures what the configured models cost on the devices that are here, and keeps it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from device_profiles.acceptance import TargetTexts
from device_profiles.store import ProfileStore
from orchestrator.cli.options import ConfigFile
from orchestrator.cli.profile_table import print_profiles
from orchestrator.errors import OutriderError, WorkerError
from orchestrator.worker.measuring.canary_aside import leave_out_canary

if TYPE_CHECKING:
    from orchestrator.config.model import ClusterConfig
    from orchestrator.planning.profiling.work import Work
    from orchestrator.protocol.contract import Cluster
    from orchestrator.protocol.findings import Finding

_Show = Callable[[str, float], None]


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ConfigFile = None,
) -> None:
    """Measure devices, the configured models on them, their drafts and the links between hosts, and keep it all."""
    from orchestrator.config.load import default_config_path, load_config
    from orchestrator.planning.profiling.work import list_work, measuring_alone, profile_store, remote_work

    path = config or default_config_path()
    loaded = leave_out_canary(load_config(path))
    store = profile_store(loaded)
    base = path.resolve().parent
    work = []
    for target in loaded.targets:
        if node:
            work += remote_work(target, base, device or (), threads or (), node)
        else:
            work += list_work(target, base, device or (), threads or ())
    todo = [one for one in work if refresh or not one.is_known(store)]
    serving = "" if force else _describe_daemon(loaded)
    if not serving:
        todo = [one for one in work if one in todo or not one.is_done(store)]
    across = bool(loaded.cluster.address)  # which nodes there are is known only there
    started, done = time.perf_counter(), _Done()
    doubts = [f"{one.title}: {why}: measured again" for one in todo if (why := one.describe_doubt(store))]
    if todo or across or refresh or not store.links():
        if serving:
            raise ProfileError(serving)
        for line in doubts:
            print(f"outrider: {line}", file=sys.stderr)
        busy = ProfileError("another `outrider profile` is measuring with this store; wait for it to end")
        with measuring_alone(store, busy):
            asyncio.run(_measure(loaded, todo, store, _How(refresh, seconds), done))
    took_s = time.perf_counter() - started if done.found or done.failures else 0.0
    _show(work, store, took_s, as_json=as_json)
    if done.failures:
        raise ProfileError("\n".join(done.failures))


@dataclass(frozen=True, slots=True)
class _How:
    """`refresh`: what is stored is measured again. `steps_s`: how long forwards of a model are measured."""

    refresh: bool
    steps_s: float


@dataclass(slots=True)
class _Done:
    """How many values were found, whether what the target says is among them, and what failed."""

    found: int = 0
    texts: bool = False
    failures: list[str] = field(default_factory=list)


def _describe_daemon(config: ClusterConfig) -> str:
    """Return why nothing is to be measured where the configuration's daemon answers: its device would be measured at
    half its speed, and its streams would stall. "" where none does."""
    from orchestrator.cli.daemon_socket import StatusError, query_daemon
    from orchestrator.config.load import admin_socket_path

    try:
        answer = query_daemon(admin_socket_path(config, config.api.port))
    except StatusError:
        return ""
    return (
        f"a daemon serves here ({answer['phase']}, {answer['streams']} streams): stop it, or measure beside it with "
        "--force"
    )


async def _measure(config: ClusterConfig, todo: list[Work], store: ProfileStore, how: _How, done: _Done) -> None:
    """Measure models on this machine or on the nodes that were named, one after another, then links."""
    from orchestrator.daemon.bootstrap.clusters import local_cluster, measuring_cluster

    with _bars(len(todo) + 1) as bar:
        here = [one for one in todo if not one.node]
        if here:
            async with _open_cluster(local_cluster()) as cluster:
                await _measure_models(cluster, here, store, how, done, bar)
        async with _open_cluster(measuring_cluster(config)) as cluster:
            there = [one for one in todo if one.node]
            await _measure_models(cluster, there, store, how, done, bar)
            await _measure_links(cluster, store, how, done, bar("links"))


@asynccontextmanager
async def _open_cluster(cluster: Cluster) -> AsyncIterator[Cluster]:
    await cluster.open()
    try:
        yield cluster
    finally:
        await cluster.close()


async def _measure_models(
    cluster: Cluster, todo: list[Work], store: ProfileStore, how: _How, done: _Done, bar: Callable[[str], _Show]
) -> None:
    from orchestrator.planning.profiling.run import Watch, measure_on_cluster

    for one in todo:
        show = bar(one.title)
        try:
            # Described when its turn comes: what was stored meanwhile is known to it.
            spec = one.spec(store, refresh=how.refresh, steps_s=how.steps_s, texts_are_new=done.texts)
            await measure_on_cluster(cluster, spec, Watch(show, partial(_keep, store, done)))
        except WorkerError as error:
            done.failures.append(f"{one.title}: {error}")


async def _measure_links(cluster: Cluster, store: ProfileStore, how: _How, done: _Done, show: _Show) -> None:
    from orchestrator.planning.profiling.link_work import echo_spec, name_of, paths, probe_spec
    from orchestrator.planning.profiling.run import Watch, measure_path

    known = set() if how.refresh else {(one.left, one.right) for one in store.links()}
    every = [path for path in paths(await cluster.nodes()) if (name_of(path[0]), name_of(path[1])) not in known]
    for number, (left, right) in enumerate(every):
        show(f"{name_of(left)} to {name_of(right)}", number / len(every))
        try:
            await measure_path(
                cluster,
                echo_spec(right, across=left != right),
                partial(probe_spec, left=left, right=right),
                Watch(lambda stage, fraction: None, partial(_keep, store, done)),
            )
        except WorkerError as error:
            done.failures.append(f"link {name_of(left)} to {name_of(right)}: {error}")


def _keep(store: ProfileStore, done: _Done, value: Finding) -> None:
    store.save(value)
    done.found += 1
    done.texts |= isinstance(value, TargetTexts)


@contextmanager
def _bars(count: int) -> Iterator[Callable[[str], _Show]]:
    """Show a bar over all work, with what is being done now."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=float(count))
        begun: list[str] = []

        def begin(title: str) -> _Show:
            begun.append(title)
            done = len(begun) - 1

            def show(stage: str, fraction: float) -> None:
                part = min(1.0, max(0.0, fraction))
                shown.update(task, description=f"{title}: {stage}", completed=done + part)

            show("start", 0.0)
            return show

        yield begin


def _show(work: list[Work], store: ProfileStore, took_s: float, *, as_json: bool) -> None:
    devices = [one.find_device_profile(store) for one in work]
    models = [one for one in (piece.find_model_profile(store) for piece in work) if one is not None]
    digests = {one.model_digest for one in models}
    pairs = [one for one in store.pairs() if one.target_digest in digests]
    found: dict[str, list[Any]] = {
        "devices": [one for one in dict.fromkeys(devices) if one is not None],
        "models": models,
        "pairs": pairs,
        "links": store.links(),
    }
    if as_json:
        plain = {name: [dataclasses.asdict(one) for one in values] for name, values in found.items()}
        print(json.dumps({**plain, "took_s": took_s, "store": str(store.directory)}, indent=1))
    else:
        print_profiles(found, took_s, store.directory)
