"""A worker whose ranks are on several devices: all of them count for it, and a loss is charged to the first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.daemon.control.health.health import HealthBoard, Part, list_parts
from orchestrator.protocol.contract import WorkerSpec


def build_spec(first: int, ranks: int, node: str = "") -> WorkerSpec:
    return WorkerSpec("target", "a:b", {"model": {"tensor_parallel": ranks}}, device=f"CUDA:{first}", node=node)


@given(first=st.integers(0, 3), ranks=st.integers(1, 8), data=st.data())
def test_a_fault_of_any_of_its_devices_keeps_requests_from_it_and_of_no_other(
    first: int, ranks: int, data: st.DataObject
) -> None:
    faulty = data.draw(st.integers(0, first + ranks + 1))
    board = HealthBoard()
    board.observe_fault([Part("device", f"here/CUDA:{faulty}")], "it is lost", 0.0)
    assert board.judge(list_parts(build_spec(first, ranks)), 0.0).refuses == (first <= faulty < first + ranks)


def test_its_loss_is_charged_to_the_first_device_and_to_its_host() -> None:
    spec = build_spec(1, 2, "10.0.0.2")
    host = Part("host", "10.0.0.2")
    first, second = Part("device", "10.0.0.2/CUDA:1"), Part("device", "10.0.0.2/CUDA:2")
    assert list_parts(spec) == (first, second, host)
    assert list_parts(spec, first=True) == (first, host)
    board = HealthBoard()
    for now_s in range(9):
        board.observe_loss("target", list_parts(spec, first=True), "device", "device_lost", "lost", float(now_s))
    assert board.judge([first], 9.0).refuses
    assert not board.judge([second], 9.0).refuses
