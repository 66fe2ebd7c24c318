"""The tool that breaks daemons: its schedule, its comparison, its figures, and a short run that loses nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_lab.chaos.__main__ import build_parser, read_options
from outrider_lab.chaos.answers import ClientAnswer
from outrider_lab.chaos.cases import Case, Lengths, make_cases
from outrider_lab.chaos.compare import Difference, compare_tokens, split_text
from outrider_lab.chaos.faults import KINDS, choose_kinds
from outrider_lab.chaos.faults.storage import flip_bits
from outrider_lab.chaos.poisoned import POISON_SEED
from outrider_lab.chaos.records import (
    DAEMON,
    FaultRecord,
    Restart,
    StreamRecord,
    find_false_alarms,
    is_whole,
    kinds_met,
    list_activity,
    measure_recovery,
    measure_silence,
    summarise,
)
from outrider_lab.chaos.schedule import QUIET_END_S, Shape, plan_faults
from outrider_lab.chaos.service import PACKAGES, Layout, Service, read_workers, write_configuration
from outrider_lab.free_port import find_free_port

ROOT = Path(__file__).parents[4]
WORDS = st.sampled_from("abc")
TEXTS = st.lists(WORDS, max_size=40)
SHAPES = st.dictionaries(
    st.sampled_from(sorted(KINDS)),
    st.builds(Shape, st.integers(1, 3), st.floats(0, 5), st.floats(5, 20)),
    min_size=1,
)


@given(st.integers(), SHAPES, st.floats(1, 900))
def test_the_schedule_is_a_function_of_the_seed(seed, shapes, duration_s):
    plan = plan_faults(seed, shapes, duration_s)
    assert plan == plan_faults(seed, dict(reversed(shapes.items())), duration_s)
    assert [fault.number for fault in plan] == list(range(len(plan)))
    assert all(fault.at_s <= duration_s - QUIET_END_S for fault in plan[1:])
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    for fault in plan:
        shape = shapes[fault.kind]
        assert shape.shortest_s - 0.001 <= fault.hold_s <= shape.longest_s + 0.001
        assert 0 <= fault.pick < 1


@given(st.integers(), SHAPES)
def test_kinds_come_as_often_as_their_weights_say(seed, shapes):
    plan = plan_faults(seed, shapes, 3000.0)
    round_ = sum(shape.weight for shape in shapes.values())
    counted = Counter(fault.kind for fault in plan[: len(plan) // round_ * round_])
    assert counted == {kind: shape.weight * (len(plan) // round_) for kind, shape in shapes.items()}


def test_other_seeds_break_other_things():
    shapes = {name: kind.shape for name, kind in KINDS.items()}
    assert plan_faults(1, shapes, 60.0) != plan_faults(2, shapes, 60.0)


@given(TEXTS, st.booleans())
def test_the_same_tokens_do_not_differ(text, whole):
    assert not compare_tokens(text, text, whole=whole)


@given(TEXTS, st.data())
def test_a_gap_is_lost_tokens(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    assert compare_tokens(text, text[:start] + text[end:]) == Difference(lost=end - start)


@given(TEXTS, st.data())
def test_a_repetition_is_doubled_tokens(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    assert compare_tokens(text, text[:end] + text[start:]) == Difference(doubled=end - start)


@given(TEXTS, st.data())
def test_other_tokens_are_wrong_tokens(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    assert compare_tokens(text, text[:start] + ["x"] * (end - start) + text[end:]) == Difference(wrong=end - start)
    assert compare_tokens(text, text[:start] + ["x"] * 3 + text[start:]) == Difference(wrong=3)


@given(TEXTS, TEXTS)
def test_any_difference_is_seen(left, right):
    assert bool(compare_tokens(left, right)) == (left != right)


@given(TEXTS, st.data())
def test_a_broken_stream_is_compared_as_far_as_it_came(text, data):
    end = data.draw(st.integers(0, len(text)))
    assert not compare_tokens(text, text[:end], whole=False)
    assert compare_tokens(text, [*text[:end], "x"], whole=False).wrong == 1


@given(st.text())
def test_words_and_their_spaces_are_the_text(text):
    assert "".join(split_text(text)) == text


def test_an_answer_with_other_counts_or_another_end_differs():
    case = Case("0 completions", "completions", {})
    good = ClientAnswer("a b c", finish="stop", completion_tokens=3)
    assert not ClientAnswer("a b c", finish="stop", completion_tokens=3).compare(case, good, whole=True)
    fewer = ClientAnswer("a b c", finish="stop", completion_tokens=2)
    assert fewer.compare(case, good, whole=True) == Difference(lost=1)
    more = ClientAnswer("a b c", finish="stop", completion_tokens=5)
    assert more.compare(case, good, whole=True) == Difference(doubled=2)
    assert ClientAnswer("a b c", finish="length", completion_tokens=3).compare(case, good, whole=True)


def test_an_answer_that_broke_within_a_word_differs_only_where_it_came_to_other_letters():
    case = Case("0 tool", "chat", {})
    good = ClientAnswer("one two three", {0: "look{}"}, finish="stop")
    assert not ClientAnswer("one tw", {0: "lo"}).compare(case, good, whole=False)
    assert ClientAnswer("one tx", {}).compare(case, good, whole=False)
    assert ClientAnswer("one", {0: "la"}).compare(case, good, whole=False)


def stream(times: list[float], ended_s: float = math.inf, error: str = "", lane: int = 0) -> StreamRecord:
    return StreamRecord(0, lane, "case", True, times[0] if times else 0.0, ended_s, times, error=error)


def fault(**fields: Any) -> FaultRecord:
    return FaultRecord(0, "kill-target", 0.0, **{"began_s": 10.0, "healed_s": 10.0, **fields})


def test_recovery_is_the_longest_wait_for_a_next_token():
    running = [stream([9.0, 10.1, 13.5, 13.6], 13.7), stream([9.5, 10.2, 10.3], 10.4)]
    assert measure_recovery(10.0, running) == pytest.approx(3.5)
    assert measure_silence(running[0]) == pytest.approx(3.4)
    pace = stream([9.95, 10.3, 10.7, 11.1], 11.2)
    assert measure_recovery(10.0, [pace]) == pytest.approx(0.3)
    over, later = stream([1.0, 2.0], 3.0), stream([11.0, 20.0], 21.0)
    assert measure_recovery(10.0, [over, later]) is None
    assert measure_recovery(10.0, [*running, stream([9.0, 10.1], 12.0, "APIError")]) is None


def test_a_restart_is_a_false_alarm_where_no_fault_may_be_its_cause():
    killed = fault(victims=("target-0",), cleared_s=15.0)
    of_other, early, late = (
        Restart(11.0, "target-1", 1, ""),
        Restart(9.0, "target-0", 1, ""),
        Restart(20.0, "target-0", 2, ""),
    )
    its_own, never_back = Restart(11.0, "target-0", 1, ""), fault(victims=("target-0",))
    assert find_false_alarms([its_own, of_other, early, late], [killed]) == [of_other, early, late]
    assert find_false_alarms([late], [never_back]) == []
    daemon = Restart(11.0, DAEMON, 1, "exited with 1")
    assert find_false_alarms([daemon], [killed]) == []
    assert find_false_alarms([daemon], [fault(cleared_s=15.0)]) == [daemon]
    assert find_false_alarms([its_own], [fault(began_s=None, victims=("target-0",))]) == [its_own]


def test_the_summary_counts_what_was_lost():
    torn = stream([9.0], 12.0, "APIError: gone")
    other = stream([9.0, 11.0], 12.0)
    other.difference = Difference(wrong=1, lost=2, doubled=3)
    found = summarise([fault(recovery_s=2.0), fault(began_s=None, skipped="no draft")], [torn, other], [])
    assert (found["faults"], found["fault_kinds"], found["streams"]) == (1, {"kill-target": 1}, 2)
    assert [found[name] for name in ("client_errors", "wrong_tokens", "lost_tokens", "doubled_tokens")] == [1, 1, 2, 3]
    assert (found["recovery_p50_s"], found["recovery_p99_s"], found["false_alarms"]) == (2.0, 2.0, 0)
    assert not is_whole(found)
    assert is_whole(summarise([fault(recovery_s=2.0)], [stream([9.0], 12.0)], []))


def test_streams_know_the_faults_that_they_met():
    assert kinds_met(stream([9.0], 9.5), [fault(cleared_s=12.0)]) == []
    assert kinds_met(stream([9.0], 11.0), [fault(cleared_s=12.0)]) == ["kill-target"]
    assert kinds_met(stream([11.0], 13.0), [fault(cleared_s=12.0)]) == ["kill-target"]
    assert kinds_met(stream([13.0], 14.0), [fault(cleared_s=12.0)]) == []
    assert kinds_met(stream([13.0], 14.0), [fault()]) == ["kill-target"]
    assert list_activity([1.0, 1.1, 1.2, 4.0]) == [(1.0, 1.2), (4.0, 4.0)]


@given(st.integers(), st.integers(8, 32))
def test_cases_are_a_function_of_the_seed_and_of_all_shapes(seed, count):
    lengths = Lengths(10, 20, 500)
    cases = make_cases(seed, "toy", count, lengths)
    assert cases == make_cases(seed, "toy", count, lengths)
    shapes = {case.name.split(" ")[1] for case in cases}
    assert shapes == {"completions", "chat", "schema", "tool"}
    assert any(len(str(case.body.get("prompt", ""))) > 500 for case in cases)


@given(st.binary(min_size=1, max_size=10_000), st.floats(0, 1, exclude_max=True))
def test_flipped_bits_are_another_file_of_the_same_size(data, pick):
    changed = flip_bits(data, pick)
    assert len(changed) == len(data)
    assert changed != data


def test_kinds_that_cannot_be_made_have_a_reason():
    kinds, skipped = choose_kinds(
        ["kill-target", "kill-draft", "cut-link", "corrupt-artefact"], Layout("scripted", "local", 1, 0, 1)
    )
    assert [kind.kind for kind in kinds] == ["kill-target"]
    assert "--drafts" in skipped["kill-draft"]
    assert "--runtime ray" in skipped["cut-link"]
    assert "--model default" in skipped["corrupt-artefact"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--faults", "kill-everybody"), "no kind is called 'kill-everybody'"),
        (("--minutes", "0"), "--minutes"),
        (("--faults", "cut-link"), "--runtime ray"),
        (("--streams", "0"), "--streams"),
    ],
)
def test_bad_usage_ends_with_2_and_says_why(arguments, said, capsys):
    parser = build_parser()
    with pytest.raises(SystemExit) as ended:
        read_options(parser.parse_args(arguments), parser)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


async def test_poison_ends_the_worker_that_decodes_it_and_other_requests_do_not(tmp_path):
    port = find_free_port()
    config = write_configuration(tmp_path, Layout("scripted", "local", 1, 0, 1), port)
    environment = {"PYTHONPATH": os.pathsep.join(PACKAGES)}
    service = Service(tmp_path, config, port, tmp_path / "log", environment, poisoned=True)
    service.start()
    try:
        await service.wait_ready(1)
        asked = {"model": "toy", "prompt": "the sea", "max_tokens": 20, "ignore_eos": True, "seed": 3}
        async with httpx.AsyncClient(base_url=service.url, timeout=180.0) as client:
            (before,) = read_workers(await service.status() or {})
            assert (await client.post("/v1/completions", json=asked)).is_success
            (same,) = read_workers(await service.status() or {})
            assert same.pid == before.pid
            poison = await client.post("/v1/completions", json={**asked, "seed": POISON_SEED + 1})
            assert poison.is_error
        assert service.find(before.pid) is None
    finally:
        await service.stop()


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider_lab.chaos", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_killed_workers_cost_clients_nothing(tmp_path):
    out = tmp_path / "out.json"
    kinds = ("--faults", "kill-target,kill-draft", "--streams", "4")
    done = chaos("--seed", "1", "--minutes", "0.35", "--json", str(out), *kinds)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    summary = report["summary"]
    assert summary["faults"] == sum(summary["fault_kinds"].values()) >= 2
    assert summary["restarts"] == summary["faults"]
    assert summary["streams"] == len(report["streams"]) >= 8
    assert summary["tokens"] > 500
    assert report["environment"]["processor"]
    assert report["daemon"]["exit_code"] == 0
    assert report["daemon"]["left_behind"] == []
    assert all(each["cleared_s"] > each["began_s"] for each in report["faults"])
    assert out.with_suffix(".log").read_text()
