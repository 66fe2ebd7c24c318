"""Made-up clusters to plan for: devices in the proportions of real ones, each a little different, by a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from device_profiles.cost import StepCost
from device_profiles.link import LinkProfile
from device_profiles.measured import DeviceRates, MatmulRate
from device_profiles.profile import Precision
from device_profiles.units import GIB, MS_PER_S
from policies.planning.plan import (
    Constraints,
    Device,
    DrafterFacts,
    Host,
    Inventory,
    ModelFacts,
    Option,
    PlanGoal,
    Role,
    Workload,
)

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
_SHARE = 0.6  # of the stated rates that a forward reaches


@dataclass(frozen=True, slots=True)
class _Kind:
    """Stated figures of a kind of device, and a made-up price an hour; `cores` of its host where it is a CPU."""

    name: str
    kind: str
    memory_gib: float
    gb_per_s: float
    bf16_tflops: float
    power_w: float
    price_per_hour: float
    cores: int = 0


_KINDS = (
    _Kind("24g-a", "gpu", 24, 1008, 165, 450, 1.1),
    _Kind("24g-b", "gpu", 24, 600, 125, 150, 0.8),
    _Kind("24g-c", "gpu", 24, 300, 121, 72, 0.55),
    _Kind("20g", "gpu", 20, 360, 77, 140, 0.5),
    _Kind("16g-a", "gpu", 16, 320, 65, 70, 0.35),
    _Kind("16g-b", "gpu", 16, 672, 97, 285, 0.45),
    _Kind("cpu", "cpu", 64, 90, 3, 200, 0.6, 32),
)
_PARAMETERS = {"target": 70e9, "draft": 1e9}
_LAYERS = {"target": 80, "draft": 16}
_KV_BYTES = {"target": 327_680.0, "draft": 32_768.0}


def fleet(devices: int, zones: int, seed: int, *, per_host: int = 8, busy: bool = True) -> Inventory:
    """Return a cluster of so many devices: hosts of one kind of device each, spread over the zones. `busy`: other work
    takes some of every device's time, so that no two are alike."""
    draw = np.random.default_rng(seed)
    hosts: list[Host] = []
    found: list[Device] = []
    while len(found) < devices:
        kind = _KINDS[int(draw.integers(len(_KINDS)))]
        host = Host(f"host-{len(hosts):05d}", f"zone-{len(hosts) % zones:02d}", kind.cores or 64)
        hosts.append(host)
        count = 1 if kind.cores else per_host
        for number in range(min(count, devices - len(found))):
            load = float(draw.uniform(0.0, 0.3)) if busy else 0.0
            found.append(_device(f"{host.name}/{number}", host.name, kind, load))
    options = tuple(_option(kind, role, threads) for kind in _KINDS for role in Role for threads in _threads(kind))
    return Inventory(tuple(hosts), tuple(found), options)


def build_goal(concurrency: int = 8, **limits: object) -> PlanGoal:
    """Return what is planned for: a target of 70e9 parameters in bf16 with a draft of 1e9, or drafts from the text."""
    models = {
        role: ModelFacts(role, _LAYERS[role], 16_384.0 if role == "target" else 0.0) for role in ("target", "draft")
    }
    drafters = (
        DrafterFacts("draft", (0.8, 0.76, 0.72, 0.7), models["draft"]),
        DrafterFacts("text", (0.7, 0.75, 0.8), None, coverage=0.4),
    )
    load = Workload(models["target"], drafters, concurrency, prompt_tokens=512, output_tokens=256, depth_bound=8)
    return PlanGoal(load, Constraints(**limits))  # type: ignore[arg-type]


def small(seed: int, *, devices: int = 6, layers: int = 12, measured_links: bool = False) -> tuple[Inventory, PlanGoal]:
    """Return an instance that an exact solver can do: a few unlike devices on a few hosts in two zones, and a target
    that needs two to five of them."""
    draw, price = np.random.default_rng(seed), np.random.default_rng(seed + 1_000_000)
    hosts = tuple(
        Host(f"host-{number}", f"zone-{number % 2}", 64, float(price.uniform(0.1, 2.0)))
        for number in range(max(2, devices // 2))
    )
    found, options = [], []
    target = ModelFacts("target", layers, 8_192.0)
    draft = ModelFacts("draft", 4)
    for number in range(devices):
        host = hosts[int(draw.integers(len(hosts)))]
        name = f"{host.name}/{number}"
        most = int(draw.integers(max(2, layers // 5), max(3, layers // 2)))
        watts, an_hour = float(price.uniform(50.0, 400.0)), float(price.uniform(0.1, 3.0))
        memory = int((most + 0.5) * GIB)
        found.append(Device(name, host.name, "gpu", name, memory, power_w=watts, price_per_hour=an_hour))
        speed = float(draw.uniform(1.0, 4.0))
        knee = float(draw.choice([4, 8, 16]))
        rows = (1.0, knee, 4 * knee)
        costs = tuple(factor * speed * layers for factor in (0.5, 0.7, 2.0))
        options.append(
            Option(name, Role.TARGET, "target", "runtime", "bf16", StepCost(rows, costs), GIB, 0.0, 1, overhead_ms=0.3)
        )
        small_costs = tuple(0.02 * one for one in costs)
        options.append(Option(name, Role.DRAFT, "draft", "runtime", "bf16", StepCost(rows, small_costs), 1e7, 0.0, 1))
    links: tuple[LinkProfile, ...] = ()
    if measured_links:
        links = tuple(
            LinkProfile(one.name, other.name, float(draw.uniform(0.2, 6.0)), float(draw.uniform(2e8, 5e9)))
            for number, one in enumerate(hosts)
            for other in hosts[number + 1 :]
        )
    drafters = (DrafterFacts("draft", (0.8, 0.7, 0.6), draft), DrafterFacts("text", (0.6,), None, coverage=0.5))
    load = Workload(target, drafters, int(draw.integers(1, 7)), 64, 64, depth_bound=3)
    return Inventory(hosts, tuple(found), tuple(options), links), PlanGoal(load, Constraints(keep_free=0.0))


def _device(name: str, host: str, kind: _Kind, utilisation: float) -> Device:
    return Device(
        name,
        host,
        kind.kind,
        kind.name,
        int(kind.memory_gib * GIB),
        utilisation=utilisation,
        rates=DeviceRates((MatmulRate(Precision.BF16, kind.bf16_tflops * 1e12),), kind.gb_per_s * 1e9),
        power_w=kind.power_w,
        price_per_hour=kind.price_per_hour,
    )


def _threads(kind: _Kind) -> tuple[int, ...]:
    return (kind.cores // 2, kind.cores) if kind.cores else (1,)


def _option(kind: _Kind, role: Role, threads: int) -> Option:
    """Return a forward's time by the roofline: the longer of reading the weights and of computing the rows."""
    share = _SHARE * (0.5 + 0.5 * threads / kind.cores if kind.cores else 1.0)
    weights = 2.0 * _PARAMETERS[role]
    read_ms = weights / (share * kind.gb_per_s * 1e9) * MS_PER_S
    row_ms = weights / (share * kind.bf16_tflops * 1e12) * MS_PER_S
    cost = StepCost(_ROWS, tuple(max(read_ms, rows * row_ms) for rows in _ROWS), position_us=1e-3 * read_ms)
    return Option(
        kind.name,
        role,
        role,
        "roofline",
        "bf16",
        cost,
        layer_bytes=weights / _LAYERS[role],
        kv_bytes_per_token=_KV_BYTES[role],
        threads=threads,
        fixed_bytes=0.5 * GIB,
        overhead_ms=0.2,
        source="datasheet",
    )
