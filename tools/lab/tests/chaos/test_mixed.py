"""A pool of simulated devices that are not alike, measured and broken on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_lab.bench.cluster.run import ClusterLoad
from outrider_lab.chaos.answers import ClientAnswer
from outrider_lab.chaos.cases import Case
from outrider_lab.chaos.mixed import BARS, MixedBench, list_members

SOURCE = "simulated:toy?base_ms=8&row_ms=0.4&other_ms=8&other_bits=1"


def test_a_pool_of_unlike_members_is_measured_and_every_fault_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "4")  # what is set meanwhile goes with the test
    members = list_members("simulated")[:2]
    load = ClusterLoad({"source": SOURCE, "adapter": "simulated"}, (1,), 16, 1.0)
    result = MixedBench(None, members, load, tmp_path / "store", 2, 0, print).run()
    summary, row = result["summary"], result["configurations"][0]
    assert set(BARS) <= set(summary)
    assert (summary["groups"], summary["members"]) == (2, ["simulated SIM", "simulated SIM.1"])
    assert (summary["client_errors"], summary["lost_tokens"], summary["doubled_tokens"]) == (0, 0, 0)
    assert (summary["unmarked_changes"], summary["identical"]) == (0, True)
    first, second, _ = row["measured_tokens_per_s"]
    assert first > 1.3 * second, "each was asked alone"
    assert row["shares_tokens_per_s"][0] > row["shares_tokens_per_s"][1], "one request goes to the fastest"
    assert [fault["skipped"] for fault in result["faults"]["faults"]] == ["", ""]


@pytest.mark.parametrize(("from_token", "is_marked"), [(2, True), (None, False)])
def test_what_an_answer_has_of_its_own_group_is_told_from_the_rest(from_token: int | None, is_marked: bool) -> None:
    answer = ClientAnswer()
    for text, group in (("one ", "fp_a"), ("two ", "fp_a"), ("three", "fp_b")):
        answer.add({"system_fingerprint": group, "choices": [{"text": text}]})
    marks = [] if from_token is None else [{"from_token": from_token, "system_fingerprint": "fp_b"}]
    answer.add({"usage": {"completion_tokens": 3, "system_fingerprints": marks}})
    assert answer.is_marked is is_marked
    assert answer.keep_own(Case("0", "completions", {})).text == "one two "
