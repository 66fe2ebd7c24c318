"""`outrider bench plan`, as a person runs it, over a simulated device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from outrider_lab.bench.plan.texts import PASSAGE, TEXTS

from device_profiles.cost import StepCost
from device_profiles.store import ProfileStore
from orchestrator.config.load import load_config
from orchestrator.planning.profiling.work import list_work
from orchestrator.worker.measuring.prompts import TEXTS as PROFILED
from tests.support.profiles import store_simulated_profiles

TOOK_S = 7.0


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A simulated device with a stored profile of its script."""
    directory = tmp_path_factory.mktemp("plan")
    path = directory / "cluster.yaml"
    path.write_text(
        "model: {source: 'simulated:toy?base_ms=4&row_ms=0.2', adapter: simulated, name: toy}\n"
        f"cluster: {{runtime: local}}\nstore: {{directory: {directory / 'store'}}}\n"
        "devices: {price_per_hour: 3.6}\n"
    )
    (work,) = list_work(load_config(path), directory)
    made = store_simulated_profiles(directory / "made", {"SIM": 4.2})
    store = ProfileStore(directory / "store" / "profiles")
    store.save(replace(made.devices()[0], fingerprint=work.fingerprint))
    cost = StepCost((1.0, 101.0), (4.2, 24.2))
    store.save(
        replace(made.models()[0], fingerprint=work.fingerprint, model_digest=work.digest, cost=cost, took_s=TOOK_S)
    )
    return path


def test_predictions_come_from_profiles_and_stand_beside_what_is_measured(outrider, config, tmp_path):
    few = ("--config", config, "--requests", 3, "--output-tokens", 8)
    found = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        code, shown, errors = outrider("bench", "plan", *few, "--only", "short", "--json", out)
        assert code == 0, errors
        found.append(json.loads(out.read_text()))
        assert "median_error" in shown
        assert "<= 10 %" in shown  # the bar beside the figure
    first, again = found
    summary = first["summary"]
    assert summary["configurations"] == 6
    assert summary["profile_seconds"] == TOOK_S
    rows = {(row["depth"], row["concurrency"]): row for row in first["configurations"]}
    plain = rows["0", 1]
    parts = plain["components"]
    assert parts["tokens_per_round"] == {"predicted": 1.0, "measured": 1.0}
    assert parts["round_ms"]["predicted"] == pytest.approx(4.2 + 0.2)
    assert parts["prefill_ms"]["measured"] > 0.0
    assert plain["measured_tokens"] == 3 * 8
    assert plain["measured_cost_per_million_tokens"] == pytest.approx(0.001 / plain["measured_tokens_per_s"] * 1e6)
    assert plain["predicted_cost_per_million_tokens"] == pytest.approx(0.001 / plain["predicted_tokens_per_s"] * 1e6)
    told = [row["measured_cost_per_million_tokens"] for row in again["configurations"]]
    assert all(f"{cost:.3g}" in shown for cost in told)
    paced = (1.0 + plain["error_as_profiled"]) / first["pace"]["simulated"] - 1.0
    assert plain["error"] == pytest.approx(paced)
    assert plain["error"] == pytest.approx(plain["predicted_tokens_per_s"] / plain["measured_tokens_per_s"] - 1)
    drafts = {key: row["components"]["drafts_per_round"]["measured"] for key, row in rows.items()}
    assert drafts["4", 4] > 0 == drafts["0", 4]
    # Whatever is measured, the prediction stays what the profiles say.
    for one, other in zip(first["configurations"], again["configurations"], strict=True):
        assert one["predicted_as_profiled_tokens_per_s"] == other["predicted_as_profiled_tokens_per_s"]
        assert one["measured_tokens_per_s"] != other["measured_tokens_per_s"]
    for load in first["workloads"]:
        rates = [
            row["measured_tokens_per_s"] for row in first["configurations"] if load["load"] in row["configuration"]
        ]
        assert load["best_tokens_per_s"] == max(rates)
        assert load["chosen_vs_best"] == pytest.approx(load["chosen_tokens_per_s"] / max(rates))


def test_no_prompt_is_one_that_the_profile_was_made_of():
    own = {text for _, text in PROFILED}
    assert not own & set(TEXTS)
    assert len(set(TEXTS)) == len(TEXTS) >= 4 + 12  # none comes twice
    assert not any(text in PASSAGE for text in own)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--depth", "deep"), "--depth is a number or policy, not 'deep'"),
        (("--only", "no such thing"), "finds none of: simulated, depth 0, 1 at once, short prompts"),
        (("--runtime", "onnx_rt"), "there is no runtime for onnx_rt here"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(outrider, config, arguments, said):
    code, _, errors = outrider("bench", "plan", "--config", config, *arguments)
    assert code == 1
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
