"""Small clusters for the tests of placement, drawn by hypothesis, and the best plan found by trying everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

from hypothesis import strategies as st

from device_profiles.cost import StepCost
from device_profiles.link import LinkProfile
from device_profiles.measured import DeviceRates
from policies.planning.placement.candidate import Candidate, PlacedShard, Where, find_fit_problem, rate_candidate
from policies.planning.placement.links import links_of
from policies.planning.placement.workers import sum_fixed_bytes
from policies.planning.plan import (
    Device,
    DrafterFacts,
    EndBytes,
    Host,
    Inventory,
    ModelFacts,
    Objective,
    Option,
    Plan,
    PlanGoal,
    Prediction,
    Role,
    Workload,
)
from policies.planning.shard_cost import ModelPart, kv_bytes
from policies.planning.throughput import DraftSide, TargetSide, best_depth, predict

MIB = 1 << 20
TARGET = ModelFacts("target", 8, 4096.0)
DRAFT = ModelFacts("draft", 4)
ROOMY = 4000 * MIB

times_ms = st.sampled_from((8.0, 5.0, 6.5, 10.0, 20.0)) | st.floats(0.5, 20.0, allow_nan=False)
figures = st.sampled_from((1.0, 2.0, 0.25, 10.0)) | st.floats(0.1, 20.0, allow_nan=False)


@st.composite
def costs(draw: st.DrawFn) -> StepCost:
    first, few, many = draw(times_ms), draw(st.sampled_from((1.0, 1.2, 2.0))), draw(st.sampled_from((2.0, 4.0, 8.0)))
    return StepCost((1.0, 4.0, 16.0), (first, first * few, first * many))


@st.composite
def clusters(draw: st.DrawFn, *, memory_mib: tuple[int, int] = (50, 900)) -> Inventory:
    """Up to five devices on up to three hosts in up to two zones; every device has a profile of its own."""
    hosts = tuple(
        Host(
            f"host-{number}",
            draw(st.sampled_from(("east", "west"))),
            draw(st.sampled_from((4, 8, 2, 0))),
            draw(st.sampled_from((0.0, 0.5, 3.0))),
        )
        for number in range(draw(st.sampled_from((2, 1, 3))))
    )
    devices, options = [], []
    for number in range(draw(st.sampled_from((2, 3, 1, 4, 5)))):
        name = f"device-{number}"
        devices.append(
            Device(
                name,
                draw(st.sampled_from(hosts)).name,
                draw(st.sampled_from(("cpu", "gpu"))),
                name,
                draw(st.integers(*memory_mib)) * MIB,
                utilisation=draw(st.sampled_from((0.0, 0.0, 0.4))),
                rates=DeviceRates(bandwidth_bytes_per_s=draw(st.sampled_from((0.0, 5e10)))),
                power_w=draw(figures),
                price_per_hour=draw(figures),
            )
        )
        for role, model in ((Role.TARGET, TARGET), (Role.DRAFT, DRAFT)):
            for runtime in draw(st.sampled_from((("a",), ("a", "b"), ()))):
                options.append(draw(_options(name, role, model, runtime)))
    links = draw(st.lists(_links(hosts), max_size=2))
    return Inventory(hosts, tuple(devices), tuple(options), tuple(links))


@st.composite
def _options(draw: st.DrawFn, profile: str, role: Role, model: ModelFacts, runtime: str) -> Option:
    cost = draw(costs())
    return Option(
        profile,
        role,
        model.name,
        runtime,
        "as_file",
        cost if role is Role.TARGET else cost.scale_by(draw(st.sampled_from((0.05, 0.1, 0.3)))),
        layer_bytes=draw(st.sampled_from((10, 40))) * MIB if role is Role.TARGET else MIB,
        kv_bytes_per_token=draw(st.sampled_from((0.0, 0.1 * MIB))),
        threads=draw(st.sampled_from((2, 1, 4, 0))),
        ends=draw(st.sampled_from((EndBytes(), EndBytes(20 * MIB, 30 * MIB, 40 * MIB, 10 * MIB)))),
        fixed_bytes=draw(st.sampled_from((0, 20))) * MIB,
        overhead_ms=draw(st.sampled_from((0.0, 0.5))),
        row_invariant=draw(st.sampled_from((True, True, True, False))),
        min_rows=draw(st.sampled_from((1, 2))),
    )


@st.composite
def _links(draw: st.DrawFn, hosts: tuple[Host, ...]) -> LinkProfile:
    left, right = draw(st.sampled_from(hosts)), draw(st.sampled_from(hosts))
    return LinkProfile(left.name, right.name, draw(st.floats(0.05, 5.0)), 1e9)


@st.composite
def loads(draw: st.DrawFn) -> Workload:
    chance = st.sampled_from((0.9, 0.7, 0.5, 0.8, 0.95, 1.0, 0.0))
    drafters = []
    if draw(st.sampled_from((True, True, False))):
        drafters.append(DrafterFacts("model", tuple(draw(st.lists(chance, min_size=1, max_size=3))), DRAFT))
    if draw(st.booleans()):
        offered = tuple(sorted(draw(st.lists(chance, max_size=3)), reverse=True))
        drafters.append(
            DrafterFacts("text", (draw(chance),), None, coverage=draw(chance), offered=offered, token_ms=0.01)
        )
    concurrency, prompt, output = (draw(st.sampled_from(some)) for some in ((1, 2, 3, 4), (1, 100, 600), (300, 50, 1)))
    return Workload(TARGET, tuple(drafters), concurrency, prompt, output, depth_bound=4)


def brute_force(cluster: Inventory, wanted: PlanGoal) -> tuple[float, float]:
    """Return the merit of the best target on one device with any draft, by trying all, and the second figure that
    decides between equals; 0 where none fits."""
    hosts, links = {host.name: host for host in cluster.hosts}, links_of(cluster)
    load, known = wanted.workload, [(0.0, 0.0)]
    for device, option in _places(cluster, Role.TARGET):
        room = device.memory_bytes * (1 - wanted.constraints.keep_free)
        fixed, kv = sum_fixed_bytes(option, TARGET.layers), kv_bytes(option, load)
        fits = [count for count in range(1, load.concurrency + 1) if fixed + kv * count <= room]
        if not fits or not _enough(hosts[device.host], option.threads):
            continue
        side = TargetSide((ModelPart(option, 1.0, device.utilisation),), (), fits[-1])
        drafts = [(DraftSide(one), device) for one in load.drafters if one.model is None]
        for drafter in (one for one in load.drafters if one.model is not None):
            for other, draft in _places(cluster, Role.DRAFT):
                part = ModelPart(draft, 1.0, other.utilisation)
                needed = sum_fixed_bytes(draft, DRAFT.layers) + kv_bytes(draft, load) * fits[-1]
                alone = needed <= other.memory_bytes * (1 - wanted.constraints.keep_free)
                together = other.id != device.id or needed + fixed + kv * fits[-1] <= room
                if not (alone and together and _enough(hosts[other.host], draft.threads)):
                    continue
                link = links.between(device.host, other.host)
                both = option.threads + draft.threads
                if other.id == device.id:
                    drafts.append((DraftSide(drafter, part), other))
                    split = device.kind == "cpu" and option.threads and draft.threads and hosts[device.host].cores
                    if split and _enough(hosts[device.host], both):
                        beside = DraftSide(drafter, part, True, link, device.rates.bandwidth_bytes_per_s)
                        drafts.append((beside, other))
                elif other.host != device.host or _enough(hosts[device.host], both):
                    drafts.append((DraftSide(drafter, part, True, link), other))
        known.append(_merit_by_hand(best_depth(side, None, load), [device], hosts, wanted))
        for found, at in drafts:
            depths = [load.depth_bound] if found.drafter.by_policy else range(1, load.depth_bound + 1)
            known += [
                _merit_by_hand(predict(side, found, load, depth), [device, at], hosts, wanted) for depth in depths
            ]
    most = max(merit for merit, _ in known)
    return most, max(second for merit, second in known if merit >= most * (1 - 1e-9))


def _merit_by_hand(
    one: Prediction, devices: list[Device], hosts: dict[str, Host], wanted: PlanGoal
) -> tuple[float, float]:
    used = {device.id: device for device in devices}.values()
    price = sum(device.price_per_hour for device in used)
    price += sum(hosts[host].price_per_hour for host in {device.host for device in used})
    power = sum(device.power_w for device in used)
    rate = one.goodput_tokens_per_s
    return {
        Objective.THROUGHPUT: (rate, 0.0),
        Objective.LATENCY: (one.sequences / wanted.workload.concurrency / one.tpot_ms, -one.ttft_ms),
        Objective.COST: (rate / price, rate),
        Objective.ENERGY: (rate / power, rate),
    }[wanted.objective]


def merit_told(found: Plan, wanted: PlanGoal) -> tuple[float, float]:
    """Return the merit of a plan of one replica by the figures that it shows, as `brute_force` does."""
    one, rate = found.replicas[0].prediction, found.goodput_tokens_per_s
    return {
        Objective.THROUGHPUT: (rate, 0.0),
        Objective.LATENCY: (one.sequences / wanted.workload.concurrency / one.tpot_ms, -one.ttft_ms),
        Objective.COST: (1e6 / 3600 / found.cost_per_million_tokens, rate),
        Objective.ENERGY: (1.0 / found.joules_per_token, rate),
    }[wanted.objective]


def brute_force_shards(cluster: Inventory, wanted: PlanGoal) -> float:
    """Return the merit of the best target in two or more layer shards with all requests at once, by trying every order
    of devices, every cut and every draft; 0 where none fits. Each device has one option for the target."""
    load, links = wanted.workload, links_of(cluster)
    options = {role: {one.profile: one for one in cluster.options if one.role is role} for role in Role}
    cores, best, layers = {host.name: float("inf") for host in cluster.hosts}, 0.0, load.target.layers
    for count in range(2, len(cluster.devices) + 1):
        for order in permutations(cluster.devices, count):
            for ends in combinations(range(1, layers), count - 1):
                cut = zip(order, (0, *ends), (*ends, layers), strict=True)
                shards = tuple(
                    PlacedShard(one, options[Role.TARGET][one.profile], first, end, layers) for one, first, end in cut
                )
                if find_fit_problem(Candidate(shards, load.concurrency), cores, load, wanted.constraints):
                    continue
                for candidate in _with_drafts(shards, cluster, options[Role.DRAFT], wanted):
                    if not find_fit_problem(candidate, cores, load, wanted.constraints):
                        best = max(best, rate_candidate(candidate, links, wanted).merit[0])
    return best


def _with_drafts(
    shards: tuple[PlacedShard, ...], cluster: Inventory, options: dict[str, Option], wanted: PlanGoal
) -> Iterator[Candidate]:
    sequences = wanted.workload.concurrency
    yield Candidate(shards, sequences)
    for drafter in wanted.workload.drafters:
        if drafter.model is None:
            yield Candidate(shards, sequences, drafter)
            continue
        for device in cluster.devices:
            if device.id not in {one.device.id for one in shards}:
                draft = PlacedShard(device, options[device.profile], 0, drafter.model.layers, drafter.model.layers)
                yield Candidate(shards, sequences, drafter, draft, Where.FAR)  # links and overlap go by the hosts


def _places(cluster: Inventory, role: Role) -> Iterator[tuple[Device, Option]]:
    exact = [one for one in cluster.options if one.role is role and (one.row_invariant or role is Role.DRAFT)]
    for device in cluster.devices:
        yield from ((device, option) for option in exact if option.profile == device.profile)


def _enough(host: Host, threads: int) -> bool:
    return not host.cores or threads <= host.cores


def faster(cluster: Inventory, device: str, factor: float) -> Inventory:
    """Return the cluster with one device faster at everything."""
    profile = next(one.profile for one in cluster.devices if one.id == device)
    options = tuple(
        replace(one, cost=one.cost.scale_by(factor), overhead_ms=one.overhead_ms * factor)
        if one.profile == profile
        else one
        for one in cluster.options
    )
    devices = tuple(
        replace(one, rates=DeviceRates(bandwidth_bytes_per_s=one.rates.bandwidth_bytes_per_s / factor))
        if one.id == device
        else one
        for one in cluster.devices
    )
    return replace(cluster, options=options, devices=devices)
