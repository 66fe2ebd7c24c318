"""Traces: what public files are read as, and what is made."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_lab.simulation.trace import (
    MadeTraffic,
    TracedRequest,
    TraceError,
    UserClass,
    make_requests,
    open_trace,
    save_requests,
)

from orchestrator.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,27
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 4000, "input_length": 300, "output_length": 20, "hash_ids": [0]}
{"timestamp": 4500, "input_length": 40, "output_length": 9}
"""


def read(path, text):
    path.write_text(text)
    return list(open_trace(str(path)))


def test_azures_csv(tmp_path):
    first, second = read(tmp_path / "azure.csv", AZURE)
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert (second.prompt_tokens, second.output_tokens) == (110, 27)
    assert second.arrival_s == pytest.approx(1.5)


def test_burst_gpts_csv_without_what_failed(tmp_path):
    assert read(tmp_path / "burst.csv", BURST_GPT) == [TracedRequest(0.0, 472, 18), TracedRequest(113.0, 417, 276)]


def test_mooncakes_json_lines_share_their_first_block(tmp_path):
    first, second, third = read(tmp_path / "mooncake.jsonl", MOONCAKE)
    assert first == TracedRequest(0.0, 6758, 500, prefix="0", prefix_tokens=512)
    assert second == TracedRequest(3.0, 300, 20, prefix="0", prefix_tokens=300)
    assert third == TracedRequest(3.5, 40, 9)


def test_our_own_form_comes_back_as_it_was_written(tmp_path):
    requests = [TracedRequest(0.0, 3, 4, "ops", "coding", "p", 2), TracedRequest(1.25, 7, 1)]
    save_requests(requests, tmp_path / "own.jsonl")
    assert list(open_trace(str(tmp_path / "own.jsonl"))) == requests


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", AZURE + "2023-11-16 18:17:06.1,many,3\n", "a.csv:4: no request of a trace"),
        ("a.csv", AZURE + "2023-11-16 18:17:06.1,0,3\n", "a.csv:4: tokens are 1 or more"),
        ("a.csv", "when,what\n1,2\n", "a.csv:1: a CSV trace has the columns"),
        ("a.jsonl", MOONCAKE + "{oops\n", "a.jsonl:4: no request of a trace"),
        ("a.jsonl", MOONCAKE + '{"arrival_s": 0, "prompt_tokens": 4}\n', "a.jsonl:4: no request of a trace"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 0, "input_length": 4, "output_length": 1}\n', "a.jsonl:4: tokens are"),
        ("a.txt", "", "a trace is a .jsonl, .csv or .yaml file"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path, name, text, said):
    with pytest.raises(TraceError) as told:
        read(tmp_path / name, text)
    assert said in str(told.value)


@pytest.mark.parametrize("source", ["poisson:rate=fast", "poisson:speed=3", "poisson:rate=-1", "bursts:rate"])
def test_made_traffic_says_which_key_is_wrong(source):
    with pytest.raises(TraceError, match="--trace"):
        open_trace(source)


def test_a_file_of_made_traffic_says_its_line(tmp_path):
    path = tmp_path / "made.yaml"
    path.write_text("traffic:\n  rate: 2\n  seconds: -1\n")
    with pytest.raises(ConfigError, match=r"made.yaml:3"):
        open_trace(str(path))


KINDS = st.sampled_from(["poisson", "bursts", "diurnal", "constant"])


@given(KINDS, st.floats(0.5, 20.0), st.floats(1.0, 200.0), st.integers(0, 1000), st.integers(0, 5))
def test_made_traffic_is_its_seeds_and_within_bounds(arrival, rate, seconds, seed, prefixes):
    users = (
        UserClass(name="a", share=2, prefixes=prefixes, prefix_tokens=32),
        UserClass(name="b", prompt_tokens=9, spread=0),
    )
    traffic = MadeTraffic(arrival=arrival, rate=rate, seconds=seconds, classes=users, seed=seed)
    requests = list(make_requests(traffic))
    assert requests == list(make_requests(traffic))
    times = [one.arrival_s for one in requests]
    assert times == sorted(times)
    assert all(0.0 <= one < seconds for one in times)
    for one in requests:
        assert one.output_tokens >= 1
        if one.user_class == "b":
            assert (one.prompt_tokens, one.prefix) == (9, "")
        else:
            assert bool(one.prefix) == bool(prefixes)
            assert one.prompt_tokens > one.prefix_tokens or not one.prefix


@pytest.mark.parametrize("arrival", ["poisson", "diurnal", "constant"])
def test_the_mean_rate_is_what_was_asked_for(arrival):
    traffic = MadeTraffic(arrival=arrival, rate=20.0, seconds=2000.0, period_s=500.0, seed=7)
    count = sum(1 for _ in make_requests(traffic))
    assert abs(count - 40_000) < 5 * math.sqrt(40_000)


def test_bursts_come_at_the_mean_rate_and_are_dense():
    traffic = MadeTraffic(arrival="bursts", rate=20.0, seconds=40_000.0, burst_factor=4.0, burst_s=20.0, seed=3)
    per_s = [0] * 40_000
    for one in make_requests(traffic):
        per_s[int(one.arrival_s)] += 1
    assert 0.9 * 20 < sum(per_s) / 40_000 < 1.1 * 20
    # A seventh of the time there is four times the mean, else half of it.
    assert 0.1 < sum(count > 45 for count in per_s) / 40_000 < 0.2


def test_a_day_has_its_trough_where_it_begins():
    requests = list(make_requests(MadeTraffic(arrival="diurnal", rate=50, seconds=1000, period_s=1000, trough=0.2)))
    night = sum(one.arrival_s < 100 or one.arrival_s > 900 for one in requests) / 200
    noon = sum(400 < one.arrival_s < 600 for one in requests) / 200
    assert night < 0.35 * 50
    assert noon > 1.6 * 50
