"""A long stage is said again at least every 5 s, and a stage without figures once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.daemon.control.actions import Notify
from orchestrator.daemon.control.events import ClusterOpened, WorkerSaid, WorkersChosen
from orchestrator.daemon.control.stage_log import StageLog
from orchestrator.daemon.control.step import step
from orchestrator.protocol.events import Progress, StillWorking
from policies.serving.failover.watchdog import Pulse
from tests.control.test_step import World, spec


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=200))
def test_a_conversion_is_said_at_least_every_5_s_however_its_words_come(gaps_s: list[float]) -> None:
    log, now_s, said_s = StageLog(), 0.0, 0.0
    for number, gap_s in enumerate(gaps_s):
        now_s += gap_s
        news = log.describe_news("", Progress(f"convert m: {number} MiB of 200 MiB", number / 200.0), now_s)
        if news:
            assert f"{number} MiB of 200 MiB" in news
            assert number == 0 or now_s - said_s >= 4.0, "a log is no ticker"
            said_s = now_s
        assert now_s - said_s < 5.0


def test_a_stage_is_said_at_once_and_again_with_news_alone() -> None:
    log = StageLog()
    assert log.describe_news("a", Progress("load", 0.0), 0.0) == "load"
    assert log.describe_news("a", Progress("load", 0.5), 0.1) == ""
    assert log.describe_news("b", Progress("load", 0.0), 0.1) == "load"
    assert log.describe_news("a", Progress("load", 0.9), 9.0) == "load 90%"
    assert log.describe_news("a", Progress("waiting for another, 2 s so far", -1.0), 9.1)
    assert log.describe_news("a", Progress("waiting for another, 4 s so far", -1.0), 11.0) == ""
    assert log.describe_news("a", Progress("waiting for another, 6 s so far", -1.0), 14.0)
    assert log.describe_news("a", Progress("waiting for another, 6 s so far", -1.0), 99.0) == ""


def test_a_step_of_a_load_that_says_nothing_is_said_at_least_every_5_s() -> None:
    world, log, said_s = World(max_restarts=1), StageLog(), [0.0]
    world.tell(WorkersChosen([spec("t0")], []))
    world.tell(ClusterOpened())
    world.start(0)
    for quarter in range(1, 121):
        world.now_s = quarter / 4.0
        pulse = Pulse(-1.0, world.now_s * 1000.0, 0.0, 2)
        for action in step(world.state, WorkerSaid(0, StillWorking("load", pulse)), world.now_s):
            assert isinstance(action, Notify)
            assert isinstance(action.event, Progress)
            if news := log.describe_news("", action.event, world.now_s):
                assert news.startswith("load (")
                said_s.append(world.now_s)
    assert max(after - before for before, after in itertools.pairwise(said_s)) < 5.0
    assert said_s[-1] > 25.0
