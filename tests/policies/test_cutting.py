"""What a cut into shards is predicted to take."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, groupby, pairwise, permutations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from device_profiles.profile import Exactness
from policies.planning.placement import plan_placement
from policies.planning.placement.shards import CutShard, Hops, Items, cut_shards
from policies.planning.plan import (
    Constraints,
    Device,
    EndBytes,
    Host,
    Inventory,
    ModelFacts,
    Option,
    Plan,
    PlanGoal,
    Role,
    Workload,
    diff,
)
from tests.support.made_clusters import build_goal, fleet, small


def test_only_bit_exactness_is_charged_for_rows_that_are_padded():
    cluster, wish = small(0, devices=5, layers=8)

    def predict(exactness, min_rows):
        load = replace(wish.workload, exactness=exactness, drafters=())
        options = tuple(replace(option, min_rows=min_rows) for option in cluster.options)
        plan = plan_placement(replace(cluster, options=options), replace(wish, workload=load))
        assert len(plan.replicas[0].shards) > 1
        return plan.goodput_tokens_per_s

    assert predict(Exactness.BIT, 8) < predict(Exactness.BIT, 1)
    assert predict(Exactness.KERNEL, 8) == predict(Exactness.KERNEL, 1) == predict(Exactness.BIT, 1)


@pytest.mark.parametrize("seed", range(4))
def test_devices_that_are_alike_are_looked_at_once_and_the_plan_is_as_good(seed):
    """With an unnoticeable difference between devices, none is like another, and all are looked at."""
    cluster, goal = fleet(10, 2, seed, per_host=5, busy=False), build_goal(4, max_replicas=1)
    unlike = [replace(device, utilisation=number * 1e-12) for number, device in enumerate(cluster.devices)]
    few, every = (plan_placement(one, goal) for one in (cluster, replace(cluster, devices=tuple(unlike))))
    assert len(few.replicas[0].shards) > 1
    assert few.goodput_tokens_per_s == pytest.approx(every.goodput_tokens_per_s, rel=1e-9)


@st.composite
def items_and_hops(draw: st.DrawFn) -> tuple[Items, Hops, int]:
    """Draw up to four devices on up to three hosts in two zones, hops that cost more the further they go, and a number
    of layers. Each end of the model takes some devices' room, for a layer or all."""
    count, layers = draw(st.integers(2, 4)), draw(st.integers(2, 6))
    hosts = np.array([draw(st.integers(0, 2)) for _ in range(count)], np.int64)
    figures = [[draw(st.sampled_from((0.5, 1.0, 3.0, 7.0))) for _ in range(count)] for _ in range(3)]
    most = np.array([draw(st.integers(1, layers)) for _ in range(count)], np.int64)
    at_ends = np.array([[draw(st.integers(0, int(one))) for _ in range(2)] for one in most], np.int64)
    near, far, further = sorted(draw(st.sampled_from((0.1, 0.4, 2.0))) for _ in range(3))
    items = Items(
        device=np.arange(count),
        host=hosts,
        zone=hosts % 2,
        fixed_ms=np.array(figures[0]),
        layer_ms=np.array(figures[1]),
        host_ms=np.array(figures[2])[hosts % count],
        most=most,
        most_at_ends=at_ends,
        tie=np.arange(count),
        option=np.zeros(count, np.int64),
    )
    return items, Hops(near, far, further, near / 2, far / 2, further / 2), layers


def sum_ms(items: Items, hops: Hops, shards: Sequence[CutShard]) -> float:
    """Return what shards take in this order, infinite where one has no room or a host's or a zone's are apart."""
    rows = [shard.item for shard in shards]
    counts = [shard.layers for shard in shards]
    host, zone = items.host[rows].tolist(), items.zone[rows].tolist()
    for names in (host, zone):
        if len(list(groupby(names))) > len(set(names)):
            return inf
    fits = all(count <= items.most[row] for row, count in zip(rows, counts, strict=True))
    if not fits or any(counts[end] > items.most_at_ends[rows[end], end] for end in (0, -1)):
        return inf
    own = float(sum(items.fixed_ms[row] + items.layer_ms[row] * count for row, count in zip(rows, counts, strict=True)))
    paid = sum(float(items.host_ms[rows[host.index(name)]]) for name in set(host))
    places = list(zip(zone, host, strict=True))
    between = sum(
        hops.far if one[0] != other[0] else hops.zone if one != other else hops.host for one, other in pairwise(places)
    )
    back = hops.back_far if len(set(zone)) > 1 else hops.back_zone if len(set(host)) > 1 else hops.back_host
    return own + paid + between + back


@settings(max_examples=150)
@given(items_and_hops())
def test_a_cut_is_the_shortest_in_which_each_device_and_both_ends_have_room(drawn: tuple[Items, Hops, int]) -> None:
    items, hops, layers = drawn
    count = len(items.device)
    best = inf
    for shards in range(2, count + 1):
        for order in permutations(range(count), shards):
            for ends in combinations(range(1, layers), shards - 1):
                counts = (end - begin for begin, end in zip((0, *ends), (*ends, layers), strict=True))
                cut = [CutShard(item, share) for item, share in zip(order, counts, strict=True)]
                best = min(best, sum_ms(items, hops, cut))
    taken = cut_shards(items, layers, hops, range(2, count + 1))
    assert (taken is None) == (best == inf)
    if taken is not None:
        assert sum(shard.layers for shard in taken) == layers
        assert sum_ms(items, hops, taken) == pytest.approx(best)


MIB = float(1 << 20)


def plan_halves(device_mib: float, load: Workload) -> Plan:
    """Plan for two hosts. 17 of 28 layers have room beside the embedding, and 11 beside the output layer and its
    logits, where each has 1400 MiB."""
    ends = EndBytes(first=200 * MIB, last=350 * MIB, both=350 * MIB, logits=200 * MIB)
    hosts = tuple(Host(name, cores=2) for name in ("a", "b"))
    devices = tuple(Device(f"{host.name}/CPU", host.name, "cpu", "cpu", int(device_mib * MIB)) for host in hosts)
    option = Option(
        *("cpu", Role.TARGET, "target", "runtime", "as_file", StepCost((1.0,), (40.0,)), 50 * MIB, 1000.0),
        ends=ends,
        fixed_bytes=100 * MIB,
        workspace_bytes=150 * MIB,
        source="few layers",
    )
    return plan_placement(Inventory(hosts, devices, (option,)), PlanGoal(load, Constraints(keep_free=0.0)))


def test_a_model_that_no_equal_halves_hold_is_cut_where_its_ends_have_room():
    plan = plan_halves(1400.0, Workload(ModelFacts("target", 28, 8_192.0), (), 1, 512, 256))
    first, last = plan.replicas[0].shards
    assert (first.first_layer, first.end_layer, last.end_layer) == (0, last.first_layer, 28)
    assert last.end_layer - last.first_layer <= 11
    assert first.memory.weights == int((200 + 50 * first.end_layer) * MIB)
    assert first.memory.workspace == int(150 * MIB)
    assert last.memory.weights == int((350 + 50 * (28 - first.end_layer)) * MIB)
    assert last.memory.workspace == int(350 * MIB)
    assert all(shard.memory.total <= 1400 * MIB for shard in (first, last))


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1400.0, 2000.0),
    st.integers(1, 4096),
    st.integers(1, 8),
)
def test_a_cut_target_is_loaded_with_the_kv_cache_that_its_devices_have_room_for(
    device_mib: float, configured_mib: int, requests: int
) -> None:
    configured = int(configured_mib * MIB)
    plan = plan_halves(
        device_mib, Workload(ModelFacts("target", 28), (), requests, 512, 256, kv_cache_bytes=configured)
    )
    (replica,) = plan.replicas
    needed = 1000.0 * 768 * replica.prediction.sequences
    assert min(configured, needed) <= replica.kv_cache_bytes <= configured

    def sum_bytes(kv_cache_bytes: float) -> list[float]:
        shares = [(shard.end_layer - shard.first_layer) / 28 for shard in replica.shards]
        return [
            shard.memory.total - shard.memory.kv_cache + share * kv_cache_bytes
            for shard, share in zip(replica.shards, shares, strict=True)
        ]

    assert sum_bytes(replica.kv_cache_bytes) == pytest.approx([shard.memory.total for shard in replica.shards], abs=2)
    assert max(sum_bytes(min(replica.kv_cache_bytes, needed))) <= device_mib * MIB + 2
    if replica.kv_cache_bytes > needed:
        assert max(sum_bytes(replica.kv_cache_bytes)) <= device_mib * MIB + 2
    if max(sum_bytes(configured)) <= device_mib * MIB - 2:
        assert replica.kv_cache_bytes == configured, "all of it has room"
    other = replace(plan, replicas=(replace(replica, kv_cache_bytes=replica.kv_cache_bytes + int(MIB)),))
    assert [(change.part, change.restart) for change in diff(plan, other).changes] == [("replica 0 KV cache", True)]
