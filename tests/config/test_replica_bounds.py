"""`model.replicas` as bounds: what is refused, at its line, and what starts from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import draft_specs, engine_options, worker_specs
from orchestrator.planning.wanted import start_replicas
from tests.support.config import parse_config

HEAD = "model:\n  source: simulated:toy\n  adapter: simulated\n"


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("  replicas: {min: 1}\n", "4: model.replicas.max: is missing"),
        ("  replicas:\n    min: 3\n    max: 2\n", "6: model.replicas.max: must be at least min, which is 3"),
        ("  replicas: {max: 1}\n", "4: model.replicas.max: is min, so that load decides nothing; raise it, or write"),
        ("  replicas: {max: 65}\n", "4: model.replicas.max: must be 1 to 64, not 65"),
        ("  replicas: {max: 2, idle: 3}\n", "4: model.replicas.idle: unknown key; did you mean 'idle_s'"),
        ("  replicas: {max: 2, idle_s: soon}\n", "4: model.replicas.idle_s: must be a number"),
        (
            "  replicas:\n    max: 3\n    places: [{}, {}]\n",
            "6: model.replicas.places: must be one for each of max, which is 3, not 2",
        ),
        ("  replicas: {max: 2, places: [{}, {core: [0]}]}\n", "4: model.replicas.places[1].core: unknown key"),
        (
            "  replicas: {max: 2, places: [{}, {threads: -1}]}\n",
            "4: model.replicas.places[1].threads: must be 0 to 1024",
        ),
        (
            "  replicas: {max: 2, places: [{}, {cores: [4095]}]}\n",
            "4: model.replicas.places[1].cores: this machine has",
        ),
        ("  replicas: {max: 2, places: [{}, {host: 10.0.0.3}]}\n", "4: model.replicas.places[1].host: goes with Ray"),
        ("  replicas: {max: 2}\n", "4: model.replicas.places: is missing: a second replica would compute on the same"),
        (
            "  replicas: {max: 2}\n  device: SIM.1\ndevices: {threads: 1}\n",
            "4: model.replicas.places: is missing: a second replica would compute on the same device, SIM.1",
        ),
        (
            "  device: auto\n  replicas: {max: 2, places: [{}, {}]}\n",
            "5: model.replicas.places: the plan chooses them; leave them out",
        ),
        (
            "  replicas: {max: 2}\ndevices: {threads: 1, cores: [0]}\n",
            "5: devices.cores: are one worker's; give each replica its own",
        ),
    ],
)
def test_bounds_that_contradict_each_other_or_change_nothing_are_told_at_their_line(tmp_path, tail, said):
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + tail)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:{said}")


@pytest.mark.parametrize(
    "tail",
    [
        "  replicas: {max: 2}\ndevices: {threads: 1}\n",
        "  replicas: {max: 2}\n  device: auto\n",
        "  replicas: {max: 2}\ncluster: {address: 'head:6379'}\n",
        "  replicas: {min: 2, max: 3, idle_s: 5, places: [{}, {}, {}]}\n",
    ],
)
def test_bounds_between_which_load_can_decide_are_taken(tmp_path, tail):
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + tail)
    assert load_config(path).model.bounds is not None


def test_it_starts_with_the_least_in_the_first_places_and_drafts_have_slots_for_the_most(tmp_path: Path):
    draft = "{method: model, source: 'simulated:toy', adapter: simulated, process: own, workers: {min: 1}}"
    bounds = "{min: 2, max: 3, places: [{cores: [0]}, {threads: 2}, {cores: [1]}]}"
    text = f"{HEAD}  replicas: {bounds}\nlimits: {{max_running: 4}}\ndrafts: [{draft}]\n"
    config = parse_config(text, tmp_path / "c.yaml")
    options = engine_options(config, tmp_path)
    first = worker_specs(options, config)
    every = worker_specs(options, start_replicas(config, 3))
    assert [(one.name, one.cores) for one in every] == [("target-0", [0]), ("target-1", []), ("target-2", [1])]
    assert first == every[:2]
    assert draft_specs(options, config) == draft_specs(options, start_replicas(config, 3))
    assert draft_specs(options, config)[0].options["slots"] == 12
    alone = parse_config(f"{HEAD}  replicas: {{max: 2}}\n", tmp_path / "c.yaml")
    assert [one.name for one in worker_specs(options, alone)] == ["target-0"], "it may get company"
