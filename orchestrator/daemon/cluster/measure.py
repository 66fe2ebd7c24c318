"""Measures what a plan over hosts would need: models on their devices, all hosts at the same time, and links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b

import msgspec

from adapters.contract import Progress, silent
from device_profiles.store import ProfileStore
from device_profiles.units import GIB
from orchestrator.daemon.cluster.inventory import HostInventory, MissingProfile
from orchestrator.errors import WorkerError
from orchestrator.planning.profiling.run import Watch, measure_on_cluster, measure_path
from orchestrator.planning.profiling.work import Work, echo_spec, paths, probe_spec
from orchestrator.protocol.contract import Cluster
from orchestrator.telemetry import get_logger

MOST_PATHS = 128
"""In a larger cluster so many paths are measured, chosen by chance; the median of a class stands for the rest. ADR
0060."""

_log = get_logger(__name__)


async def profile_hosts(
    cluster: Cluster, hosts: Mapping[str, HostInventory], store: ProfileStore, progress: Progress, budget_s: float
) -> None:
    """Keep the profiles that hosts brought, and measure what they lack: at most one piece of work on each host at a
    time. Equal devices are measured once. What cannot be measured is logged, and left out of plans.

    After `budget_s` no further piece is begun, once a target is known."""
    for host in hosts.values():
        for device in host.devices_measured:
            store.save(device)
        for model in host.models_measured:
            store.save(model)
    spent = _Budget(hosts, store, budget_s).is_spent
    for role in ("target", "draft"):  # what drafts are worth is measured on what the target says
        shares = share_work(hosts, role)
        todo = {
            node: [work for work in (_build_work(piece, node) for piece in mine) if not work.is_known(store)]
            for node, mine in shares.items()
        }
        if any(todo.values()):
            await asyncio.gather(*(_profile_host(cluster, mine, store, progress, spent) for mine in todo.values()))


def share_work(hosts: Mapping[str, HostInventory], role: str) -> dict[str, list[MissingProfile]]:
    """Return which host measures what: each piece of work goes to one host that has the device, to the one with the
    least to do. Of what may be cut that is the one with most room: where it measures the whole, nobody needs a part."""
    shares: dict[str, list[MissingProfile]] = {node: [] for node in hosts}
    offers: dict[tuple[object, ...], list[tuple[str, MissingProfile]]] = {}
    for node, host in hosts.items():
        for piece in host.missing:
            if piece.job.role == role:
                model = piece.job.model
                formats = (model.weights, model.activations, model.kv_cache_precision, piece.job.drafter)
                offers.setdefault((piece.fingerprint, model.adapter, piece.threads, piece.digest, *formats), []).append(
                    (node, piece)
                )
    for offered in sorted(offers.values(), key=len):
        node, piece = min(offered, key=lambda offer: (-_count_room(offer[1]), len(shares[offer[0]])))
        shares[node].append(piece)
    return shares


def _count_room(missing: MissingProfile) -> int:
    """Return the whole GiB that may be filled where layers may be cut: what is free differs a little among hosts."""
    return missing.job.room_bytes // GIB if missing.job.may_cut else 0


def _build_work(missing: MissingProfile, node: str) -> Work:
    return Work(msgspec.structs.replace(missing.job, keep=True), missing.fingerprint, missing.threads, node)


class _Budget:
    """How long measuring may take from now on."""

    def __init__(self, hosts: Mapping[str, HostInventory], store: ProfileStore, budget_s: float) -> None:
        missing = [piece for host in hosts.values() for piece in host.missing if piece.job.role == "target"]
        self._store, self._missing = store, {piece.digest for piece in missing}
        self._end_s = time.monotonic() + budget_s

    def is_spent(self) -> bool:
        """Return whether no more is to be begun: what is known is enough for a plan."""
        if time.monotonic() < self._end_s:
            return False
        known = {model.model_digest for model in self._store.models() if model.role == "target"}
        return not self._missing or bool(known & self._missing)


async def _profile_host(
    cluster: Cluster, todo: Sequence[Work], store: ProfileStore, progress: Progress, is_spent: Callable[[], bool]
) -> None:
    for number, piece in enumerate(todo):
        if is_spent():
            left = "; ".join(work.title for work in todo[number:])
            _log.warning("placement.profile_budget_s is spent: not measured, and not planned with", left=left)
            return
        title = f"profile {piece.title}"
        progress(title, -1.0)
        watch = Watch(partial(_tell, progress, title), store.save)
        try:
            await measure_on_cluster(cluster, piece.spec(store, refresh=False), watch)
        except WorkerError as error:
            _log.warning("cannot be measured, and is not planned with", work=piece.title, reason=str(error))


def _tell(progress: Progress, title: str, stage: str, fraction: float) -> None:
    progress(f"{title}: {stage}", fraction)


async def measure_links(
    cluster: Cluster,
    nodes: Sequence[str],
    stated: Collection[frozenset[str]],
    store: ProfileStore,
    progress: Progress,
) -> None:
    """Measure the paths between nodes, by their addresses, that are neither stored nor `stated`: as many at the same
    time as share no host. What cannot be measured is logged, and planned with what is usual."""
    known = {frozenset((link.left, link.right)) for link in store.links()} | set(stated)
    todo = [path for path in sample_paths(nodes) if frozenset(path) not in known]
    for number, together in enumerate(pack_paths(todo)):
        progress("measure links between hosts", number / len(todo))
        await asyncio.gather(*(_measure_path(cluster, left, right, store) for left, right in together))


async def _measure_path(cluster: Cluster, left: str, right: str, store: ProfileStore) -> None:
    echo = echo_spec(right, across=left != right)
    watch = Watch(silent, store.save)
    try:
        await measure_path(cluster, echo, partial(probe_spec, left=left, right=right), watch)
    except WorkerError as error:
        _log.warning("cannot be measured", link=f"{left} to {right}", reason=str(error))


def sample_paths(nodes: Sequence[str], most: int = MOST_PATHS) -> list[tuple[str, str]]:
    """Return the paths within and between nodes; of more than `most` a part, the same for the same nodes."""
    every = paths(sorted(nodes))
    if len(every) <= most:
        return every
    return sorted(every, key=lambda path: blake2b("\n".join(path).encode()).digest())[:most]


def pack_paths(todo: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield the paths in groups in which no host stands twice."""
    left = list(todo)
    while left:
        taken: set[str] = set()
        together, later = [], []
        for path in left:
            if taken.isdisjoint(path):
                together.append(path)
                taken.update(path)
            else:
                later.append(path)
        yield together
        left = later
