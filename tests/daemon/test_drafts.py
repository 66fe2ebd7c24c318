"""Draft models in a real daemon: a chain of them, one that fails while it serves, and one that does not fit."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.support import tiny_models
from tests.support.daemon import configuration, outrider_process, running

ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 120, "temperature": 0.7, "seed": 4}
# A depth that is fixed: these drafts cost what the target costs, and would not be asked for.
DRAFTED = ASK | {"extra_body": {"speculative_config": {"num_speculative_tokens": 8}}}


def drafts(*lines: str) -> str:
    return "drafts:\n" + "".join(f"  - {{{line}}}\n" for line in lines)


def model(script: str = "") -> str:
    return f"method: model, source: 'simulated:toy?{script}', adapter: simulated"


def read_counters(url: str, drafter: str) -> dict[str, float]:
    lines = [line.split(" ") for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {
        name.split("{")[0].removeprefix("outrider_drafter_"): float(value)
        for name, value in lines
        if f'drafter="{drafter}"' in name and "_created" not in name
    }


def test_a_chain_serves_and_goes_on_without_the_one_that_fails(tmp_path, plain, outrider):
    expected = plain.client.completions.create(**ASK).choices[0].text
    chain = drafts("method: suffix", model(), model("fault=device_lost&at=30"))
    with running(configuration(tmp_path, extra=chain)) as daemon:
        assert daemon.status()["ready"]["drafters"] == ["suffix", "model", "model-2"]
        for _ in range(2):
            assert daemon.client.completions.create(**DRAFTED).choices[0].text == expected
        daemon.wait_for("gauges", running=0)
        states = daemon.status()["gauges"]["drafters"]
        assert [state["name"] for state in states] == ["suffix", "model", "model-2"]
        assert (states[1]["adapter"], states[1]["device"], states[1]["state"]) == ("simulated", "SIM", "ok")
        good = read_counters(daemon.url, "model")
        assert good["up"] == 1.0
        assert good["draft_tokens_total"] >= good["accepted_tokens_total"] > 0
        assert good["seconds_total"] > 0
        shown = outrider("status", "--socket", str(daemon.admin))[1]
        assert "drafter model-2" in shown
        assert daemon.status()["gauges"]["low_acceptance"] == []
    only = drafts(model("fault=device_lost&at=9"))
    with running(configuration(tmp_path, extra=only)) as daemon:
        assert daemon.client.completions.create(**DRAFTED).choices[0].text == expected
        daemon.wait_for("gauges", running=0)
        (state,) = daemon.status()["gauges"]["drafters"]
        assert state["state"] == "failed"
        assert "the device was lost" in state["reason"]
        assert read_counters(daemon.url, "model")["up"] == 0.0
        assert daemon.status()["totals"]["restarts"] == 0
        assert "FAILED" in outrider("status", "--socket", str(daemon.admin))[1]
        assert "drafter model failed and is not used any more" in daemon.log.read_text()


def test_a_draft_that_says_other_tokens_is_warned_of_once(tmp_path, outrider):
    with running(configuration(tmp_path, extra=drafts(model("shift=1")))) as daemon:
        for _ in range(2):
            daemon.client.completions.create(**DRAFTED)
        daemon.wait_for("gauges", running=0)
        (warned,) = daemon.status()["gauges"]["low_acceptance"]
        assert (warned["drafter"], warned["route"], warned["user"]) == ("model", "/v1/completions", "")
        causes = ("nothing_accepted", "overconfident")  # by chance a token may be right, now or later
        assert warned["cause"] in causes
        assert "LOW ACCEPTANCE of model" in outrider("status", "--socket", str(daemon.admin)).stdout
        assert read_counters(daemon.url, "model")["outrider_low_acceptance"] == 1
        lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if "low acceptance" in line]
        assert [(line["level"], line["cause"] in causes) for line in lines] == [("warning", True)]
        assert "draft" in lines[0]["advice"]


@pytest.mark.slow
def test_a_draft_of_another_vocabulary_serves_where_it_is_translated(tmp_path, plain, outrider):
    """The draft's weights are random: what it says is useless, and the answers are the target's."""
    tiny_models.write_model(tmp_path / "tiny", "llama", kind="BF16")
    expected = plain.client.completions.create(**ASK).choices[0].text
    greedy = {"temperature": 0}
    expected_greedy = plain.client.completions.create(**ASK | greedy).choices[0].text
    translated = drafts("method: model, source: tiny, mismatched_vocabulary: translate")
    with running(configuration(tmp_path, extra=translated)) as daemon:
        assert daemon.client.completions.create(**DRAFTED).choices[0].text == expected
        assert daemon.client.completions.create(**DRAFTED | greedy).choices[0].text == expected_greedy
        daemon.wait_for("gauges", running=0)
        (state,) = daemon.status()["gauges"]["drafters"]
        assert (state["state"], state["vocabulary"]) == ("ok", "translated")
        assert state["rounds"] > 0
        assert "vocabulary translated" in outrider("status", "--socket", str(daemon.admin))[1]
    # A target that a draft process is worth waiting for.
    short = ASK | {"max_tokens": 12, "extra_body": {"speculative_config": {"num_speculative_tokens": 2}}}
    apart = drafts("method: model, source: tiny, mismatched_vocabulary: translate, process: own")
    with running(configuration(tmp_path, script="base_ms=20", extra=apart)) as daemon:
        for _ in range(100):
            assert expected.startswith(daemon.client.completions.create(**short).choices[0].text)
            daemon.wait_for("gauges", running=0)
            (state,) = daemon.status()["gauges"]["drafters"]
            if state["remote"]["in_time"]:
                break
            time.sleep(0.1)
        assert (state["state"], state["vocabulary"]) == ("ok", "translated")


def test_a_draft_with_another_vocabulary_is_refused_at_the_start(tmp_path):
    tiny_models.write_model(tmp_path / "tiny", "llama", kind="BF16")
    config = configuration(tmp_path, extra=drafts("method: suffix", "method: model, source: tiny"))
    found = outrider_process("serve", "--config", str(config))
    assert found.returncode == 1
    assert "drafts[1]" in found.stderr
    assert "cluster.yaml:" in found.stderr
    assert "the first that differs is id 0: '\\x00' and '<|pad|>'" in found.stderr
