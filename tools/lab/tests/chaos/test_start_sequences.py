"""Random sequences of events at the start of real daemons with real workers: whoever serves answers, and whoever does
not says why to everybody who asks, with one cause. So is it of pools of unlike replicas. In the end all of them serve.

A seed is a sequence: `pytest tools/lab/tests/chaos/test_start_sequences.py -m slow -k seed-07` repeats it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.daemon import configuration, running
from tests.support.profiles import store_simulated_profiles
from tests.support.small_disk import small_disk
from tests.support.start_checks import ask
from tools.lab.tests.chaos.start_events import Start, plan_events

ALL, CONVERTED = range(23), range(23, 26)
DISK_MIB, CONVERTED_MIB = 32, 512
UNLIKE = "[{device: SIM}, {device: SIM.1, exactness: kernel}, {exactness: kernel, max_running: 2}]"
"""Replicas of two groups of bits."""
EVENTS = ("kill-worker", "stop-worker", "reload-good", "reload-bad", "disk-full")


def name_seeds(numbers: range) -> list[object]:
    return [pytest.param(number, id=f"seed-{number:02}") for number in numbers]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a daemon says that nothing happens to."""
    with running(configuration(tmp_path_factory.mktemp("plain"), extra="drafts: []")) as plain:
        return ask(plain)[0]


def write_config(directory: Path, disk: Path, seed: int) -> tuple[Path, bool]:
    """Write the file of a seed; returns it, and whether its devices are left to a plan."""
    drawn = random.Random(f"start {seed}")
    planned, load_ms = drawn.random() < 0.5, drawn.choice((100, 800, 2500))
    replicas, own = str(drawn.choice((1, 1, 2))), drawn.random() < 0.3 and not planned
    script = f"load_ms={load_ms}"
    draft = "[{method: model, process: own, source: 'simulated:toy?', adapter: simulated}]" if own else "[]"
    extra = f"drafts: {draft}\nalerts: {{every_s: 0.1}}\n"
    if not planned:
        replicas = drawn.choice((replicas, replicas, UNLIKE, f"{{min: 2, max: 3, places: {UNLIKE}}}"))
    if planned:
        extra += "placement: {profile: never}\n"
        store_simulated_profiles(disk / "store" / "profiles", {"SIM": 2.0, "SIM.1": 3.0}, script=script)
    path = configuration(directory, script=script, replicas=replicas, extra=extra)
    text = path.read_text().replace(f"'{directory}/st", f"'{disk}/st")
    path.write_text(text.replace("adapter: simulated,", "adapter: simulated, device: auto,", 1) if planned else text)
    return path, planned


def run_sequence(path: Path, disk: Path, seed: int, kinds: tuple[str, ...]) -> str:
    """Start a daemon, let it happen, and stop it; returns what it answered in the end."""
    with Start(path, disk) as start:
        try:
            start.follow(plan_events(seed, kinds))
            answer = start.wait_served()
            assert start.daemon.stop() == 0
        except AssertionError as error:
            raise AssertionError("\n".join([f"seed {seed}: {error}", *start.told])) from error
    return answer


def run_simulated(directory: Path, seed: int) -> str:
    with small_disk(directory / "disk", DISK_MIB) as disk:
        path, planned = write_config(directory, disk, seed)
        return run_sequence(path, disk, seed, (*EVENTS, "cordon-device") if planned else EVENTS)


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", name_seeds(ALL))
def test_whoever_serves_answers_and_whoever_does_not_says_why(tmp_path, expected, seed):
    assert run_simulated(tmp_path, seed) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", name_seeds(CONVERTED))
def test_a_model_that_is_converted_meanwhile(tmp_path, first_layers_path, seed):
    with small_disk(tmp_path / "disk", CONVERTED_MIB) as disk:
        path = configuration(tmp_path, extra="drafts: []\nalerts: {every_s: 0.1}\n")
        text = path.read_text().replace(
            "'simulated:toy?', adapter: simulated", f"'{first_layers_path}', adapter: openvino_rt"
        )
        path.write_text(text.replace(f"'{tmp_path}/st", f"'{disk}/st"))
        assert run_sequence(path, disk, seed, (*EVENTS, "kill-converter", "stop-converter"))
