"""The link to layers in other processes: who may call, what crosses it, and that no answer is taken for another."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from adapters.contract import (
    AdapterUnavailable,
    CapacityError,
    CountedShard,
    DeviceLost,
    LayerRange,
    LoadOptions,
    OutOfMemory,
    RuntimeFailed,
    Segment,
    Unsupported,
)
from adapters.framing import ProtocolError
from adapters.simulated.adapter import SimulatedAdapter
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.links.endpoint import EndpointServer, LinkLost, knock
from orchestrator.worker.shards.protocol import VERSION, Answer, Attach, Attached, Computed, ShardLink
from orchestrator.worker.shards.remote import RemoteRuntime
from tests.support.shard_servers import Layers, serving

LAYERS = 4


def write_layers(directory: Path, script: str = "", **options: Any) -> Layers:
    (directory / "script.txt").write_text(f"layers={LAYERS}&{script}")
    return Layers(SimulatedAdapter(), directory, LAYERS, **options)


def load(runtime: RemoteRuntime, **options: Any) -> CountedShard:
    asked = LoadOptions(device="SIM", **({"slots": 4, "kv_cache_bytes": 64 << 10} | options))
    return runtime.load_layers(Path(), asked, LayerRange(0, LAYERS), lambda stage, done: None)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[RemoteRuntime]:
    with serving(write_layers(tmp_path)) as endpoint:
        found = RemoteRuntime(endpoint)
        yield found
        found.close()


def test_who_has_another_key_is_not_let_in_and_holds_up_nobody(tmp_path: Path) -> None:
    with serving(write_layers(tmp_path), "127.0.0.1") as endpoint:
        with pytest.raises(LinkLost):
            knock(msgspec.structs.replace(endpoint, key=b"x" * len(endpoint.key)))
        found = RemoteRuntime(endpoint)
        assert found.description.layers == LAYERS
        found.close()


def test_the_newest_connection_is_the_rightful_one(tmp_path: Path) -> None:
    with serving(layers := write_layers(tmp_path)) as endpoint:
        first = RemoteRuntime(endpoint)
        shard = load(first)
        second = RemoteRuntime(endpoint)
        with pytest.raises(DeviceLost, match="the worker for layers"):
            shard.forward_layers([Segment(0, 0, [5, 6], (0, 2))], None)
        assert load(second).forward_layers([Segment(0, 0, [5, 6], (0, 2))], None).output.shape[0] == 2
        with pytest.raises(DeviceLost):  # what the first had loaded is closed
            layers.loaded[0].forward_layers([Segment(0, 0, [5, 6], (0, 2))], None)
        second.close()


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_layers_that_nobody_calls_for_longer_than_a_greeting_may_take_stay_loaded(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.protocol.links.endpoint.GREETING_S", 1.0)
    with serving(write_layers(tmp_path), "127.0.0.1") as endpoint:
        addresses = [one for one in endpoint.addresses if one.startswith(way)]
        found = RemoteRuntime(msgspec.structs.replace(endpoint, addresses=addresses))
        shard = load(found)
        time.sleep(1.5)
        try:
            assert shard.forward_layers([Segment(0, 0, [5, 6], (0, 2))], None).output.shape[0] == 2
        finally:
            found.close()


def test_another_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    said = f"speaks version {VERSION + 1}, not {VERSION}: install the same"
    with (
        serving(write_layers(tmp_path, version=VERSION + 1)) as endpoint,
        pytest.raises(AdapterUnavailable, match=said),
    ):
        RemoteRuntime(endpoint)


def test_errors_are_of_the_same_kind_on_both_sides(tmp_path: Path) -> None:
    with serving(write_layers(tmp_path, "memory_rows=8&fault=device_lost&at=4")) as endpoint:
        runtime = RemoteRuntime(endpoint)
        shard = load(runtime)
        with pytest.raises(Unsupported, match="outside the vocabulary"):
            shard.forward_layers([Segment(0, 0, [100_000, 6], (0, 2))], None)
        with pytest.raises(OutOfMemory) as raised:
            shard.forward_layers([Segment(0, 0, [5] * 9, (0, 2))], None)
        assert raised.value.can_go_on
        for _ in range(2):
            shard.forward_layers([Segment(0, 0, [5, 6], (0, 2))], None)
        with pytest.raises(DeviceLost) as lost:
            shard.forward_layers([Segment(0, 0, [5, 6], (0, 2))], None)
        assert not isinstance(lost.value, OutOfMemory)
        runtime.close()


def test_no_room_is_a_capacity_error(runtime: RemoteRuntime) -> None:
    shard = load(runtime, kv_cache_bytes=1)
    with pytest.raises(CapacityError):
        shard.forward_layers([Segment(0, 0, [5] * 40, (0, 1))], None)


def test_a_call_that_fails_unanswered_is_told_with_the_next_answer(runtime: RemoteRuntime) -> None:
    shard = load(runtime)
    shard.share(0, [5] * 32)  # the slot holds nothing
    with pytest.raises(RuntimeFailed, match="out of step with its target: slot 0 holds 0 positions"):
        shard.forward_layers([Segment(0, 0, [5, 6], (0, 2))], None)
    other = load(runtime)
    assert len(other.forward_layers([Segment(0, 0, [5, 6], (0, 2))], None).output) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(1, Attached(3)), "it answered call 1 where 2 was asked"),
        (Answer(2, Computed(1.0)), "it answered with Computed where Attached was asked for"),
    ],
)
def test_an_answer_to_another_call_is_never_taken(tmp_path: Path, answer: Answer, said: str) -> None:
    server = EndpointServer()
    described = threading.Event()

    def serve() -> None:
        admitted = server.admit(server.listening[0])
        assert admitted is not None
        link = ShardLink(admitted)
        call, _ = link.call()
        link.send(Answer(call.number, write_layers(tmp_path).description))
        link.call()
        link.send(answer)
        described.wait(30)
        link.close()

    thread = threading.Thread(target=serve)
    thread.start()
    runtime = RemoteRuntime(server.endpoint)
    with pytest.raises(DeviceLost, match=said):
        runtime._caller.ask(Attach(0, [5]), Attached, 30.0, 1)
    described.set()
    thread.join(30)
    server.close()


@pytest.mark.parametrize("width", [4, 96], ids=["with their message", "behind it"])
def test_rows_cross_to_the_bit(width: int) -> None:
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(300, width)).astype(np.float32)
    hidden.view(np.uint32)[0, 0] = 0x7FC00001  # a NaN of its own
    ours, theirs = (ShardLink(one) for one in socket.socketpair())
    sent = threading.Thread(target=lambda: ours.send(Answer(1, Computed(2.0)), hidden[:, ::1]))
    sent.start()
    answer, rows = theirs.answer(30.0)
    sent.join(30)
    assert answer.result == Computed(2.0)
    assert rows is not None
    assert rows.tobytes() == hidden.tobytes()
    for link in (ours, theirs):
        link.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\0\0\0\x04\xc1\xc1\xc1\xc1" + bytes(8), b""])
def test_what_is_no_message_ends_the_link(garbage: bytes) -> None:
    raw, other = socket.socketpair()
    raw.sendall(garbage)
    raw.close()
    link = ShardLink(other)
    with pytest.raises((LinkLost, ProtocolError)):
        link.answer(30.0)
    link.close()


def test_no_worker_at_the_endpoint_is_a_lost_device() -> None:
    with pytest.raises(DeviceLost, match="the worker for layers cannot be reached"):
        RemoteRuntime(LinkEndpoint(["unix:@outrider-nobody"], b"k" * 32))
