"""A long stage is said again at least every 5 s, and a stage without figures once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.stage_log import StageLog
from orchestrator.workers.messages import Progress


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
