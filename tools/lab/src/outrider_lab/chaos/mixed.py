"""A pool of members that are not alike, over hosts: what each decodes alone, what all do together, what a plan says of
both, and what clients lose while each member is killed and stopped in turn."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter, truediv
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from adapters.simulated.adapter import DEVICES_VARIABLE
from device_profiles.device_names import is_same_device
from orchestrator.config.load import load_config
from orchestrator.planning.here import PresentHost, PresentLinks
from orchestrator.planning.profiling.work import profile_store
from orchestrator.planning.proposal import PlanProposal, build_proposal, propose_hosts
from orchestrator.planning.wanted import build_request_from_config
from outrider_lab.bench.cluster.hosts import BenchHosts
from outrider_lab.bench.cluster.run import ClusterLoad
from outrider_lab.bench.cluster.served import MODEL, Served, measure_tokens_per_s, serve, wait_until
from outrider_lab.bench.errors import BenchError
from outrider_lab.chaos.faults.processes import KillTarget, StopTarget
from outrider_lab.chaos.run import Options, make_run
from outrider_lab.chaos.service import Layout, list_groups
from policies.planning.plan import Inventory

BARS = {
    "pool_vs_sum": (0.9, "at least"),
    "worst_vs_best_single": (0.97, "at least"),
    "median_error": (0.15, "at most"),
    "worst_error": (0.30, "at most"),
    "client_errors": (0, "at most"),
    "unmarked_changes": (0, "at most"),
    "lost_tokens": (0, "at most"),
    "doubled_tokens": (0, "at most"),
}
SIMULATED = "simulated:toy?base_ms=40&row_ms=2&other_ms=40&other_bits=1"
"""Four devices of which each has other bits, and the last takes four times as long as the first."""
_PLACES = 16  # of a member: the most requests at once for which each is measured alone. Bounds time.
_SETTLED = 4  # times as long as others is a loaded pool measured: so many requests find their places in turn.
_TURNS = 3  # in which members and pools are measured one after the other: machines drift by a tenth within minutes.
_LOAD = 2  # requests for each place of a loaded pool: with one, routing leaves the slowest member idle at times.
_PROFILE_S = 8.0  # as `outrider profile` measures
_ALL_SERVE_S = 300.0
_PARTS = ("hosts", "devices", "options")  # of an Inventory
_RUNTIMES = ("openvino_rt", "onnx_rt", "llama_cpp", "torch_device")
Member = dict[str, Any]
"""An item of `model.replicas`."""


def list_members(adapter: str, hosts: BenchHosts | None = None) -> list[Member]:
    """Return a member of each kind: four simulated devices, or the four runtimes, each on a core of its own as far as
    there are so many. Without hosts all are on this machine."""
    cores = sorted(os.sched_getaffinity(0))
    members: list[Member] = [{"max_running": _PLACES} for _ in range(4)]
    for number, member in enumerate(members):
        if hosts is not None:
            member["host"] = hosts.hosts[min(number, len(hosts.hosts) - 1)].address
        if adapter == "simulated":
            member |= {"adapter": adapter, "device": f"SIM.{number}" if number else "SIM"}
        else:
            member |= {"adapter": _RUNTIMES[number], "device": "CPU", "cores": [cores[number % len(cores)]]}
    os.environ[DEVICES_VARIABLE] = str(len(members))  # of the simulated ones
    return members


@dataclass(frozen=True, slots=True)
class MixedBench:
    """`members` of a pool on `hosts` that have Ray, or on this machine. `load`: as of ClusterBench. `faults`: so many
    strike all of them, drawn by `seed`. `tell` is called with a line for each result."""

    hosts: BenchHosts | None
    members: Sequence[Member]
    load: ClusterLoad
    store: Path
    faults: int
    seed: int
    tell: Callable[[str], object]

    def run(self) -> dict[str, Any]:
        """Return `summary`, the `configurations` and what the faults did. Raises BenchError or ChaosError."""
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            directory = Path(scratch)
            self._profile(directory)
            rows: list[dict[str, Any]] = []
            for number, pool in enumerate(self._list_pools()):
                measure = partial(self._measure, pool, directory / str(number))
                rows += measure() if self.hosts is None else self.hosts.run_on(0, measure)
        broken = self._break_members() if self.faults else None
        return {"summary": self._summarise(rows, broken), "configurations": rows, "faults": broken}

    def _list_pools(self) -> list[Sequence[Member]]:
        """Return the pools that are measured: of real devices as many at a time as each has a core of its own."""
        count = len({core for member in self.members for core in member.get("cores", ())}) or len(self.members)
        return [self.members[at : at + count] for at in range(0, len(self.members), count)]

    def _build_config(self, pool: Sequence[Member], concurrency: int = 1) -> dict[str, Any]:
        return {
            "model": {**self.load.model, "name": MODEL, "adapter": pool[0]["adapter"], "replicas": list(pool)},
            "drafts": [],
            "placement": {
                "concurrency": concurrency,
                "prompt_tokens": self.load.prompt_tokens,
                "output_tokens": self.load.output_tokens,
            },
            "limits": {"max_running": _PLACES},
            "store": {"directory": str(self.store)},
            **({"cluster": {"runtime": "local"}} if self.hosts is None else {}),
        }

    def _profile(self, directory: Path) -> None:
        """Measure what each member's device costs, on one core where it has one. Raises BenchError."""
        path = directory / "profile.yaml"
        config = self._build_config(self.members[:1])
        config["model"].pop("replicas")
        cores = self.members[0].get("cores", ())
        path.write_text(yaml.safe_dump({**config, "devices": {"cores": list(cores)}}), encoding="utf-8")
        devices = (f"--device={member['adapter']}:{member['device']}" for member in self.members)
        command = [sys.executable, "-m", "orchestrator.cli.main", "profile", "--force", "--config", str(path)]
        command.append(f"--seconds={min(_PROFILE_S, self.load.seconds)}")
        done = subprocess.run([*command, *devices], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"a member cannot be profiled: {' | '.join(done.stderr.splitlines()[-3:])}")

    def _measure(self, pool: Sequence[Member], directory: Path) -> list[dict[str, Any]]:
        """Measure at each load each member alone, by requests that ask for its bits. Then all of them at the same time,
        each with so many requests, and then the pool: in turns, of which medians count. Of the pool beside its best
        member those of each turn's ratio do. What a loaded pool is held to is measured before and behind it. Members of
        one host share its memory and the cores that its daemon takes. So a pool is held to what they make side by side,
        and a plan of a member to what it makes alone."""
        tokens = (self.load.prompt_tokens, self.load.output_tokens)
        rows = []
        with serve(self.hosts, directory, self._build_config(pool)) as served:
            wait_until(lambda: _all_serve(served), _ALL_SERVE_S, "all members serve")
            groups = list_groups(served.url.removesuffix("/v1"), MODEL)
            if len(groups) < len(pool):
                raise BenchError(f"{len(pool)} members are of {len(groups)} groups, so none can be asked alone")
            for concurrency in self.load.concurrencies:
                measure = partial(measure_tokens_per_s, served, concurrency, tokens, self.load.seconds)
                turns = [[*(measure([group]) for group in groups), measure(groups), measure()] for _ in range(_TURNS)]
                *lone, beside, shares = map(_take_medians, zip(*turns, strict=True))
                alone = [max(rates) for rates in zip(*lone, strict=True)]
                pools = [sum(turn[-1].values()) for turn in turns]
                fastest = max(zip(alone, turns[0][0], strict=True))[1]
                best = [max(rates[fastest] for rates in turn[:-2]) for turn in turns]
                planned = _plan(served.directory / "cluster.yaml", self._build_config(pool, concurrency), pool)
                row = {
                    "concurrency": concurrency,
                    "groups": groups,
                    "members": [*map(_name, pool), "pool"],
                    "measured_tokens_per_s": [*alone, statistics.median(pools)],
                    "pool_vs_best": statistics.median(map(truediv, pools, best)),
                    "beside_tokens_per_s": beside,
                    "predicted_tokens_per_s": planned,
                    "shares_tokens_per_s": shares,
                }
                rows.append(row)
                self.tell(_describe(row))
            full = _LOAD * _PLACES * len(pool)
            before = sum(measure(groups).values())
            loaded = measure_tokens_per_s(served, full, tokens, _SETTLED * self.load.seconds)
            made = sum(loaded.values())
            side_by_side = (before + sum(measure(groups).values())) / 2
            rows[-1] |= {"loaded_requests": full, "loaded_tokens_per_s": made, "pool_vs_sum": made / side_by_side}
            parts = ", ".join(f"{rate:.1f}" for rate in loaded.values())
            self.tell(f"{full} at once, tokens/s: the pool {made:.1f} ({parts}); side by side {side_by_side:.1f}")
        return rows

    def _break_members(self) -> dict[str, Any]:
        """Kill and stop each member in turn under load; returns the report of chaos. Raises ChaosError."""
        scripted = self.members[0]["adapter"] == "simulated"
        layout = Layout(
            *("scripted" if scripted else "default", "local" if self.hosts is None else "ray"),
            *(len(self.members), 0, 2 * len(self.members)),
            source=str(self.load.model["source"]),
            pool=tuple(self.members),
            store=str(self.store.resolve()),
        )
        kinds = (KillTarget, StopTarget)
        return make_run(
            Options(self.seed, 0.0, layout, kinds, {}, faults=self.faults, hosts=self.hosts), Console(stderr=True)
        )

    def _summarise(self, rows: Sequence[dict[str, Any]], broken: dict[str, Any] | None) -> dict[str, Any]:
        errors = [
            abs(predicted / measured - 1.0)
            for row in rows
            for predicted, measured in zip(row["predicted_tokens_per_s"], row["measured_tokens_per_s"], strict=True)
        ]
        told = broken["summary"] if broken is not None else {}
        names = ("changed_group", "unmarked_changes", "client_errors", "lost_tokens", "doubled_tokens")
        return {
            "groups": len({group for row in rows for group in row["groups"]}),
            "members": [*map(_name, self.members)],
            "pool_vs_sum": min(row["pool_vs_sum"] for row in rows if "pool_vs_sum" in row),
            "worst_vs_best_single": min(row["pool_vs_best"] for row in rows),
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
            **{name: told.get(name) for name in names},
            "identical": not told["wrong_tokens"] if told else None,
        }


def _take_medians(turns: Sequence[dict[str, float]]) -> list[float]:
    return [statistics.median(turn[name] for turn in turns) for name in turns[0]]


def _all_serve(served: Served) -> bool:
    phases = {replica["phase"] for replica in served.query("/admin/status")["replicas"]}
    if "failed" in phases:
        raise BenchError(f"a member has failed; see {served.directory / 'log'}")
    return phases == {"ready"}


def _plan(path: Path, config: dict[str, Any], pool: Sequence[Member]) -> list[float]:
    """Return the tokens/s that are planned for each member alone, and for the pool, from what is stored of their
    devices: by the code that plans. Raises PlanError."""
    written = path.with_name("plan.yaml")
    written.write_text(yaml.safe_dump({**config, "model": {**config["model"], "replicas": 1}}), encoding="utf-8")
    loaded = load_config(written)
    store, request = profile_store(loaded), build_request_from_config(loaded, written.parent)
    kinds = frozenset(device.hardware for device in store.devices())
    alone: list[PlanProposal] = []
    for number, member in enumerate(pool):
        host = PresentHost(f"member{number}", kinds, devices=(member["device"],), cores=len(member.get("cores", ())))
        alone.append(
            propose_hosts(
                request,
                store,
                [host],
                PresentLinks(),
                lambda option, device, member=member: (
                    option.runtime == member["adapter"]  # type: ignore[misc]
                    and is_same_device(device, member["device"])
                ),
            )
        )
    proposals = [_rename_profiles(proposal, f"member{number} ") for number, proposal in enumerate(alone)]
    clusters = [proposal.cluster for proposal in proposals]
    hosts, devices, options = (chain.from_iterable(map(attrgetter(part), clusters)) for part in _PARTS)
    cluster = Inventory(tuple(hosts), tuple(devices), tuple(options))
    behind = {name: source for proposal in proposals for name, source in proposal.behind.items()}
    together = replace(request, replicas=len(pool), least_replicas=len(pool))
    whole = build_proposal(cluster, together, behind)
    return [proposal.plan.goodput_tokens_per_s for proposal in (*alone, whole)]


def _rename_profiles(proposal: PlanProposal, prefix: str) -> PlanProposal:
    """Let a member's devices have options of their own, though another one's device is the same."""
    cluster = proposal.cluster
    devices = tuple(replace(device, profile=prefix + device.profile) for device in cluster.devices)
    options = tuple(replace(option, profile=prefix + option.profile) for option in cluster.options)
    behind = {prefix + name: source for name, source in proposal.behind.items()}
    return replace(proposal, cluster=replace(cluster, devices=devices, options=options), behind=behind)


def _describe(row: dict[str, Any]) -> str:
    rows = zip(row["members"], row["measured_tokens_per_s"], row["predicted_tokens_per_s"], strict=True)
    text = ", ".join(f"{name} {rate:.1f} ({planned:.1f} planned)" for name, rate, planned in rows)
    shares = ", ".join(f"{share:.1f}" for share in row["shares_tokens_per_s"])
    beside = ", ".join(f"{rate:.1f}" for rate in row["beside_tokens_per_s"])
    return f"{row['concurrency']} at once, tokens/s: {text}, of {shares}; side by side {beside}"


def _name(member: Member) -> str:
    return f"{member['adapter']} {member['device']}"
