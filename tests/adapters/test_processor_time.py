"""Whose the processor's time is: shared out over cores, and by a real competing process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.processor_time import (
    ProcessorMeter,
    count_runnable,
    list_own_processes,
    read_group_time,
    share_out,
    share_out_rivals,
    sum_up,
)
from device_profiles.device_load import CoreLoad
from tests.support.control_groups import FakeGroups
from tests.support.waiting import until

busy_cores = st.dictionaries(st.integers(0, 5), st.floats(0.0, 1.0), min_size=1)
spent = st.lists(st.tuples(st.floats(0.0, 3.0), st.lists(st.integers(0, 7), max_size=6, unique=True)), max_size=6)


@given(busy_cores, spent)
def test_no_core_is_given_more_than_it_was_busy(
    busy: dict[int, float], processes: list[tuple[float, list[int]]]
) -> None:
    ours = share_out(busy, processes)
    assert set(ours) == set(busy)
    assert all(-1e-9 <= ours[core] <= busy[core] + 1e-9 for core in busy)
    assert sum(ours.values()) <= sum(seconds for seconds, _ in processes) + 1e-9


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_what_is_pinned_is_on_its_core(pinned: float, free: float) -> None:
    ours = share_out({0: 1.0, 1: 1.0}, [(free, [0, 1]), (pinned, [1])])
    assert sum(ours.values()) == pytest.approx(pinned + free)
    assert ours[1] >= pinned - 1e-9


def test_a_full_core_of_ours_is_nobody_elses() -> None:
    ours = share_out({0: 1.0, 1: 0.4}, [(1.0, [0])])
    assert ours == {0: 1.0, 1: 0.0}


def test_a_control_group_bounds_what_counts_as_all() -> None:
    cores = {core: CoreLoad(0.25, 0.0) for core in range(4)}
    assert sum_up(cores, range(4)).utilisation == 0.25
    alone = sum_up(cores, range(4), group_cores=1.0)
    assert (alone.utilisation, alone.others) == (1.0, 0.0)
    shared = sum_up({core: CoreLoad(0.1, 0.1) for core in range(4)}, range(4), group_cores=1.0, group_others=0.4)
    assert shared.others == 0.4
    crowded = sum_up({core: CoreLoad(0.0, 0.9) for core in range(4)}, range(4), group_cores=2.0)
    assert crowded.others == pytest.approx(0.8), "of two cores 0.4 are left"


def test_the_tightest_group_counts(tmp_path) -> None:
    proc, groups = FakeGroups(tmp_path).place("/a/b", version=2)
    assert read_group_time(proc) is None
    (groups / "a" / "cpu.max").write_text("150000 100000\n")
    (groups / "a" / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (groups / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (groups / "a" / "b" / "cpu.stat").write_text("usage_usec 1\n")
    time_s = read_group_time(proc)
    assert time_s is not None
    assert (time_s.cores, time_s.used_s) == (1.5, 2.5)


def test_threads_that_want_a_core_are_counted(tmp_path) -> None:
    load_file = tmp_path / "loadavg"
    load_file.write_text("0.20 0.18 0.12 19/80 11206\n")
    assert count_runnable(load_file) == 19
    load_file.write_text("?")
    assert count_runnable(load_file) is None
    assert count_runnable(tmp_path / "none") is None


def test_they_are_where_others_use_the_time() -> None:
    cores = {0: CoreLoad(0.0, 1.0), 1: CoreLoad(0.0, 0.5), 2: CoreLoad(1.0, 0.0)}
    shared = share_out_rivals(cores, 1 + 1 + 6)
    assert [load.rivals for load in shared.values()] == [4.0, 2.0, 0.0], "one of the eight counts, and one is ours"
    assert sum_up(shared, range(3)).rivals == 2.0
    assert sum_up(shared, range(3), group_cores=1.0).rivals is None, "a group is bounded by its quota, not by them"
    assert [rival.rivals for rival in share_out_rivals(cores, 0).values()] == [1.0, 0.5, 0.0], "no fewer than they use"
    assert share_out_rivals(cores, None) == cores


LOOP = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are pinned on Linux only")
def test_a_process_of_ours_is_ours_and_one_of_somebody_elses_is_not() -> None:
    core = sorted(os.sched_getaffinity(0))[-1]
    with subprocess.Popen([sys.executable, "-c", LOOP % core]) as busy:
        try:
            everything, all_but = list_own_processes(), [psutil.Process()]
            assert busy.pid in [process.pid for process in everything]
            until(lambda: measure_a_second(everything, core).ours > 0.02)  # on a crowded core a loop gets its turn
            until(lambda: measure_a_second(all_but, core).others > 0.5)
        finally:
            busy.kill()


def measure_a_second(own: list[psutil.Process], core: int) -> CoreLoad:
    meter = ProcessorMeter()
    meter.measure(own)
    time.sleep(1.0)
    loads = meter.measure(own)
    assert loads is not None
    return loads.cores[core]


def test_a_number_that_is_no_workers_is_left_out() -> None:
    assert 1 not in [process.pid for process in list_own_processes([1, 2**22 + 1])]


BOUND_THREADS = """
import hashlib, os, threading
def compute(core):
    os.sched_setaffinity(0, {core})
    while True: hashlib.sha256(bytes(1 << 22))
threading.Thread(target=compute, args=(%d,), daemon=True).start()
compute(%d)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound on Linux only")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no other")
def test_a_process_whose_threads_are_bound_to_cores_has_all_of_them() -> None:
    """As a runtime's are while it computes, the first one too."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    program = subprocess.Popen([sys.executable, "-c", BOUND_THREADS % (last, first)])
    try:
        own, meter = [psutil.Process(program.pid)], ProcessorMeter()
        ours = dict.fromkeys((first, last), 0.0)
        deadline_s = time.monotonic() + 60.0
        while min(ours.values()) < 0.05:
            assert time.monotonic() < deadline_s, ours
            used = meter.measure(own)
            ours = ours if used is None else {core: used.cores[core].ours for core in ours}
            time.sleep(0.5)
    finally:
        program.kill()
        program.wait()
