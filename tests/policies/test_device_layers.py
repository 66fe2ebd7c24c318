"""Layers that a device has no room for are the host's: as few as can be, counted on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.memory import LayerCosts
from policies.models.device_layers import (
    LayeredModel,
    LayerRequest,
    LayerRoom,
    NoLayerRoom,
    count_sides,
    describe_layers,
    plan_layers,
)

MIB = 1 << 20
COSTS = LayerCosts(60 * MIB, 0, slot_rows=24, slot_positions=256, kv_copies=1.125, mlp_floats=2, hidden_floats=8)
sizes = st.integers(0, 1 << 34)


@st.composite
def models(draw):
    layers = draw(st.integers(1, 12))
    tied = draw(st.booleans())
    head = draw(st.integers(1, 1 << 30))
    return LayeredModel(
        layer_bytes=tuple(draw(st.lists(st.integers(1, 1 << 30), min_size=layers, max_size=layers))),
        layer_kv_bytes=tuple(draw(st.lists(st.sampled_from((0, 256, 4096)), min_size=layers, max_size=layers))),
        head_bytes=head,
        host_head_bytes=0 if tied else head,
        host_bytes=draw(st.integers(head if tied else 0, 1 << 31)),
        vocabulary=draw(st.integers(1, 200_000)),
        hidden=draw(st.integers(1, 8192)),
        mlp=draw(st.integers(1, 32768)),
    )


rooms = st.builds(LayerRoom, sizes, sizes, sizes, st.booleans())
requests = st.builds(LayerRequest, st.integers(0, 1 << 32), st.integers(1, 64), st.none() | st.integers(0, 20))


@given(models(), requests, rooms)
def test_the_most_layers_that_fit_are_on_the_device_and_the_host_holds_the_rest(model, asked, room):
    most = model.layers if asked.most is None else min(asked.most, model.layers)
    try:
        plan = plan_layers(model, COSTS, asked, room)
    except NoLayerRoom:
        sides = [count_sides(model, COSTS, asked, one) for one in range(most + 1)]
        fitting = [host.total + device.total * room.shared for device, host in sides if device.total <= room.device]
        assert min(fitting) > room.host_free
        return
    assert 0 <= plan.on_device <= most
    assert plan.device.total <= room.device
    assert plan.host.total + (plan.device.total if room.shared else 0) <= room.host_free
    if plan.on_device < most:
        more, _ = count_sides(model, COSTS, asked, plan.on_device + 1)
        assert more.total > room.device or room.shared
    assert bool(plan.reason) == (not plan.has_all) or (asked.most is not None and not asked.why)
    assert describe_layers(plan, "GPU0").startswith(f"{plan.on_device} of {model.layers} layers on GPU0")


@given(models(), requests, st.data())
def test_no_weight_is_lost_or_counted_twice_and_the_kv_cache_is_split_by_layers(model, asked, data):
    on_device = data.draw(st.integers(0, model.layers))
    device, host = count_sides(model, COSTS, asked, on_device)
    copied = model.head_bytes - model.host_head_bytes if on_device else 0
    whole = sum(model.layer_bytes) + model.host_head_bytes + model.host_bytes
    assert device.weights + host.weights == whole + copied
    all_on_device, _ = count_sides(model, COSTS, asked, model.layers)
    assert abs(device.kv_cache + host.kv_cache - all_on_device.kv_cache) <= 2
    if sum(model.layer_kv_bytes):
        assert all_on_device.kv_cache >= asked.kv_cache_bytes
    assert (device.total == 0) == (on_device == 0)


@given(models(), requests, st.data())
def test_one_layer_more_takes_more_of_the_device_and_less_of_the_host(model, asked, data):
    on_device = data.draw(st.integers(1, model.layers))
    (less, more_host), (more, less_host) = (count_sides(model, COSTS, asked, on_device - one) for one in (1, 0))
    assert more.weights > less.weights
    assert more.kv_cache >= less.kv_cache
    assert more_host.total >= less_host.total


@given(models(), requests, rooms, sizes)
def test_more_free_memory_never_means_fewer_layers(model, asked, room, more):
    room = LayerRoom(room.device_total, room.device_free, 1 << 60, shared=False)
    larger = LayerRoom(room.device_total, room.device_free + more, 1 << 60, shared=False)
    before, after = (plan_layers(model, COSTS, asked, one) for one in (room, larger))
    assert after.on_device >= before.on_device


def test_a_plan_says_what_did_not_fit():
    model = LayeredModel((100 * MIB,) * 4, (1024,) * 4, 50 * MIB, 50 * MIB, 50 * MIB, 1000, 64, 128)
    asked = LayerRequest(64 * MIB, 4)
    plan = plan_layers(model, COSTS, asked, LayerRoom(400 * MIB, 400 * MIB, 2048 * MIB, shared=False))
    assert (plan.on_device, plan.layers, plan.has_all) == (3, 5, False)
    text = describe_layers(plan, "CUDA0")
    assert "3 of 5 layers on CUDA0 (weights 250.0 MiB" in text
    assert "380.0 MiB may be filled" in text
    with pytest.raises(NoLayerRoom) as refused:
        plan_layers(model, COSTS, asked, LayerRoom(400 * MIB, 400 * MIB, 100 * MIB, shared=False))
    assert refused.value.needed_bytes > 100 * MIB
