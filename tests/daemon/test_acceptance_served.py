"""The acceptance rules in a real daemon with a draft model: chosen, applied, and told everywhere."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import BadRequestError

from tests.support.daemon import Daemon, configuration, running

DRAFTS = """drafts:
  - {method: suffix}
  - {method: model, source: 'simulated:toy', adapter: simulated}
"""


def ask(daemon: Daemon, rule: str | None, seed: int, temperature: float = 0.9) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and what it says of its speculation. At a fixed depth drafts are used in any case."""
    speculation = {"num_speculative_tokens": 4} | ({} if rule is None else {"acceptance": rule})
    config = {"speculative_config": speculation}
    answer = daemon.client.completions.create(
        model="toy", prompt="the sea is", max_tokens=60, temperature=temperature, seed=seed, extra_body=config
    )
    assert answer.model_extra is not None
    return answer.choices[0].text, answer.model_extra["metrics"]["speculative_decoding"]


def test_requests_choose_the_rule_and_the_default_loses_nothing(tmp_path, plain, outrider):
    expected = ask(plain, None, 4)[0]
    with running(configuration(tmp_path, extra=DRAFTS)) as daemon:
        text, told = ask(daemon, None, 4)
        assert (text, told["acceptance"]) == (expected, "coupled")
        _, told = ask(daemon, "rejection", 4)
        assert told["acceptance"] == "rejection"
        assert told["num_accepted_draft_tokens"] > 0
        greedy = ask(daemon, None, 4, 0.0)
        assert ask(daemon, "rejection", 4, 0.0)[0] == greedy[0]
        with pytest.raises(BadRequestError, match="allow_tolerance"):
            ask(daemon, "tolerance", 4)
        daemon.wait_for("gauges", running=0)
        counted = httpx.get(f"{daemon.url}/metrics").text
        assert 'outrider_acceptance_accepted_tokens_total{engine="0",model_name="toy",rule="rejection"}' in counted
        assert daemon.status()["acceptance"] == {"default": "coupled", "tolerance_allowed": False}
        assert "coupled; tolerance not allowed" in outrider("status", "--socket", str(daemon.admin))[1]


def test_tolerance_warms_up_and_says_so(tmp_path, outrider):
    allowed = "speculation: {acceptance: rejection, allow_tolerance: true, tolerance_warmup_tokens: 100}\n"
    with running(configuration(tmp_path, extra=DRAFTS + allowed)) as daemon:
        shown = outrider("status", "--socket", str(daemon.admin))[1]
        assert "rejection; tolerance allowed (LOSSY)" in " ".join(shown.split())
        assert ask(daemon, None, 1)[1]["acceptance"] == "rejection"
        told = [ask(daemon, "tolerance", seed)[1] for seed in range(6)]
        assert {one["acceptance"] for one in told} == {"tolerance"}
        assert told[0]["tolerance_delta"] is None
        assert 0.0 <= told[-1]["tolerance_delta"] <= 2.0
        daemon.wait_for("gauges", running=0, tolerance_deltas={"sampled": told[-1]["tolerance_delta"]})
        assert (
            'outrider_tolerance_delta{engine="0",model_name="toy",sampling="sampled"}'
            in httpx.get(f"{daemon.url}/metrics").text
        )
        assert ask(daemon, None, 1)[1]["tolerance_delta"] is None


def test_a_fixed_tolerance_is_told_and_the_exact_rules_do_not_know_it(tmp_path, plain, outrider):
    fixed = "speculation: {allow_tolerance: true, tolerance_delta: 0.75}\n"
    expected = ask(plain, None, 4)[0]
    with running(configuration(tmp_path, extra=DRAFTS + fixed)) as daemon:
        assert ask(daemon, "tolerance", 4)[1]["tolerance_delta"] == 0.75
        text, told = ask(daemon, None, 4)
        assert (text, told["tolerance_delta"]) == (expected, None)
        shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].replace("│", " ").split())
        assert "0.75 nats sampled, 0.75 nats greedy" in shown
        assert (
            'outrider_tolerance_recalibrations_total{engine="0",model_name="toy"} 0.0'
            in httpx.get(f"{daemon.url}/metrics").text
        )
