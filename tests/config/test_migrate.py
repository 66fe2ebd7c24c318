"""Old files keep working, and what changed is told and rewritten with every other character as it was."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.language_changes import CHANGES
from orchestrator.config.load import list_outdated, load_config, parse_config
from orchestrator.config.migrate import plan_migration, write_migration
from orchestrator.config.schema import json_schema
from orchestrator.config.sketch import load_sketch
from orchestrator.config.source_text import parse_text
from orchestrator.errors import ConfigError

OLD = """\
# The front's file.   Do not touch!
model:
  source: simulated:toy   # no weights
  adapter: simulated

placement:
  # as many as there are sockets
  replicas: 2
  score_weights: {utilisation: 3, memory_fit: 2}   # mine
limits:
  prefill_chunk: 64    # rows
  kv_cache: 64 MiB

  # behind a blank line
  max_running: 4
speculation: {pid: {set_point: 0.6}}
"""


@pytest.fixture
def old(tmp_path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(OLD)
    return path


def test_a_file_of_an_older_release_means_what_it_meant(old):
    config = load_config(old)
    assert config.model.replicas == 2
    assert config.placement.score_weights.memory_fit == 2
    assert config.limits.max_running == 4
    told = list_outdated(old)
    assert [int(line.split(":")[1]) for line in told] == [11, 8, 9]
    assert all("outrider config migrate" in line for line in told)


def test_the_rewritten_file_has_all_comments_its_order_and_the_same_meaning(old):
    before = load_config(old)
    found = plan_migration(old)
    backup = write_migration(found)
    assert backup.read_text() == OLD
    text = old.read_text()
    assert load_config(old) == before
    assert list_outdated(old) == []
    for comment in re.findall(r"#.*", OLD):
        assert comment.strip("# ") in text
    stay = [line for line in OLD.splitlines() if not re.search("replicas|utilisation|prefill_chunk", line)]
    assert [line for line in text.splitlines() if line in stay] == stay
    assert not plan_migration(old).needed


def test_lines_and_dates_are_told_and_defaults_are_left_alone(old):
    found = plan_migration(old)
    lines = {one.change.name: (one.line, one.rewritten) for one in found.concerned}
    assert lines["prefill-chunk"] == (11, True)
    assert lines["placement-replicas"] == (8, True)
    assert lines["score-weights"] == (9, True)
    assert lines["set-point"] == (16, False)
    assert lines["runtime"][1] is False
    assert "runtime" not in found.after
    later = plan_migration(old, "2026-11-23")
    assert {one.change.since for one in later.concerned} == {"2026-11-23", "2026-11-28"}


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("placement: {replicas: 2}\n", ["placement"]),
        ("placement: {replicas: 2, keep_free: 0.1}\n", ["placement", "replicas"]),
        ("placement: {keep_free: 0.1, replicas: 2}\n", ["placement", "replicas"]),
        (
            "placement: {keep_free: 0.1,\n            replicas: 2, # all\n            zones: [a]}\n",
            ["placement", "replicas"],
        ),
        ("placement: {keep_free: 0.1, # some\n            replicas: 2} # all\n", ["placement", "replicas"]),
        ("placement:\n  replicas: 2\n\n# the end", ["placement"]),
        ("placement:\n  replicas: 2", ["placement"]),
        (
            "placement:\n    score_weights:\n        utilisation: 1\n    keep_free: 0.1\n",
            ["placement", "score_weights"],
        ),
        ('placement:\n  "replicas": !!int "2"\n  keep_free: 0.1\n', ["placement", "replicas"]),
        ("limits: {prefill_chunk: 64}\n", ["limits"]),
        ("limits:\r\n  prefill_chunk: 64\r\n  max_running: 3\r\n", ["limits", "prefill_chunk"]),
    ],
)
def test_every_way_of_writing_is_rewritten_or_refused_but_never_spoilt(tmp_path, text, gone):
    newline = "\r\n" if "\r\n" in text else "\n"
    whole = f"model: {{source: 'simulated:toy', adapter: simulated}}{newline}{text}"
    path = tmp_path / "c.yaml"
    path.write_bytes(whole.encode())
    before = load_config(path)
    write_migration(plan_migration(path))
    after = path.read_bytes().decode()
    assert load_config(path) == before
    assert (newline == "\r\n") == (after.count("\r\n") == after.count("\n"))
    for comment in re.findall(r"#.*", text):
        assert comment.strip() in after
    data: Any = parse_text(after, path)[0]
    for part in gone[:-1]:
        data = data[part]
    assert gone[-1] not in data


def test_an_alias_is_left_to_whoever_wrote_it(tmp_path):
    path = tmp_path / "c.yaml"
    text = (
        "model: {source: 'simulated:toy', adapter: simulated}\n"
        "placement: &p {score_weights: {utilisation: 1, memory_fit: 2}}\n"
        "limits: {<<: {prefill_chunk: 3}, max_running: 2}\n"
    )
    path.write_text(text)
    load_config(path)
    with pytest.raises(ConfigError, match=r"limits\.prefill_chunk: change it by hand"):
        plan_migration(path)
    assert path.read_text() == text


def test_a_sketch_is_rewritten_too(tmp_path):
    path = tmp_path / "sketch.yaml"
    shape = "layers: 2, hidden: 64, heads: 2, kv_heads: 2, head_dim: 32, mlp: 128, vocabulary: 100"
    path.write_text(
        "hosts: [{name: a, memory: 8 GiB, devices: [{device: h100-sxm}]}]\n"
        f"target: {{name: m, shape: {{{shape}, context_length: 2048}}}}  # small\n"
        "placement:\n  replicas: 3\n"
    )
    before = load_sketch(path)
    assert before.replicas == 3
    assert plan_migration(path).needed
    write_migration(plan_migration(path))
    assert load_sketch(path) == before
    assert "# small" in path.read_text()


def test_what_is_wrong_for_another_reason_is_told_and_not_written(old):
    old.write_text(OLD.replace("max_running: 4", "max_runing: 4"))
    with pytest.raises(ConfigError, match="did you mean 'max_running'"):
        plan_migration(old)


def test_a_full_disk_costs_nothing(old):
    """No file may grow beyond some bytes: what a disk without room does, and a quota."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), {resource.RLIM_INFINITY}))\n"
        "from pathlib import Path; from orchestrator.config.migrate import *\n"
        "write_migration(plan_migration(Path(sys.argv[1])))"
    )
    for room in (0, 100, len(OLD) + 10):  # not even the backup; a part of it; the backup alone
        done = subprocess.run(
            [sys.executable, "-c", code, str(old), str(room)], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "it is as it was" in done.stderr
        assert old.read_text() == OLD
        assert [path.name for path in old.parent.iterdir()] == ["cluster.yaml"]


def test_the_file_keeps_its_mode_a_link_stays_one_and_backups_are_never_overwritten(old, tmp_path):
    old.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(old)
    first = write_migration(plan_migration(link))
    assert link.is_symlink()
    assert stat.S_IMODE(old.stat().st_mode) == stat.S_IMODE(first.stat().st_mode) == 0o640
    old.write_text(OLD)
    second = write_migration(plan_migration(old))
    assert (first.name, second.name) == ("cluster.yaml.bak", "cluster.yaml.bak.1")


def test_a_file_that_somebody_changed_meanwhile_is_left_alone(old):
    found = plan_migration(old)
    old.write_text(OLD + "# later\n")
    with pytest.raises(ConfigError, match="was changed meanwhile"):
        write_migration(found)
    assert old.read_text().endswith("# later\n")


def test_the_command(old, outrider):
    checked = outrider("config", "migrate", str(old), "--check")
    assert checked.returncode == 3
    assert f"{old}:11: 2026-11-21: limits.prefill_chunk is gone" in checked.stdout
    assert old.read_text() == OLD
    told = json.loads(outrider("config", "migrate", str(old), "--json").stdout)
    assert told["needed"]
    assert told["rewritten"]
    assert Path(told["backup"]).read_text() == OLD
    assert {one["name"] for one in told["changes"] if one["rewrite"]} == {
        *("prefill-chunk", "placement-replicas", "score-weights"),
    }
    again = outrider("config", "migrate", str(old), "--check", "--since", "2026-11-29")
    assert (again.returncode, again.stdout) == (0, f"{old}: nothing changed that concerns it\n")
    assert outrider("config", "migrate", str(old), "--since", "yesterday").returncode == 2
    assert outrider("config", "migrate", str(old.parent / "none.yaml")).returncode == 1
    assert not (os.path.exists(f"{old}.bak.1"))


def test_every_key_that_is_gone_has_a_change_that_says_what_became_of_it():
    """Of the language's whole history: a new key is added to the list, and none is ever taken out of it."""
    known = set((Path(__file__).parent / "language_keys.txt").read_text().split())
    now = {key for key in list_keys(json_schema()) if not key.startswith("canary.drafts[]")}
    assert now <= known, "add the new keys to tests/config/language_keys.txt"
    edited = {".".join(map(str, edit.place)) for change in CHANGES for edit in change.edit(EVERYTHING)}
    assert known - now == edited - {"target.shape.context_length"}  # of a sketch, which has no schema


EVERYTHING: dict[str, Any] = {
    "model": {"source": "x"},
    "limits": {"prefill_chunk": 1},
    "placement": {"replicas": 1, "score_weights": {"utilisation": 1}},
    "target": {"shape": {"context_length": 1}},
}


def test_changes_are_dated_in_order_and_find_nothing_where_there_is_nothing():
    days = [change.since for change in CHANGES]
    assert days == sorted(days)
    assert len({change.name for change in CHANGES}) == len(CHANGES)
    for change in CHANGES:
        for data in ({}, {"model": 3, "drafts": 3, "placement": [], "limits": None, "cluster": "x"}):
            assert change.edit(data) == []
            assert change.find(data) == []


def list_keys(schema: dict[str, Any]) -> set[str]:
    """Every key of a JSON Schema: "section.key", with [] for the items of a list."""
    found: set[str] = set()

    def walk(part: dict[str, Any], place: str, depth: int) -> None:
        if "$ref" in part:
            part = {**schema["$defs"][part["$ref"].split("/")[-1]], **part}
        for inner in (*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())):
            walk(inner, place, depth)
        if isinstance(part.get("items"), dict):
            walk(part["items"], f"{place}[]", depth)
        for key, value in part.get("properties", {}).items():
            at = f"{place}.{key}" if place else key
            found.add(at)
            if depth:
                walk(value, at, depth - 1)

    walk(schema, "", 8)
    return found


def test_the_shipped_files_have_nothing_to_rewrite():
    root = Path(__file__).parents[2]
    for path in (
        root / "cluster.yaml",
        root / "docs" / "cluster-with-drafts.yaml",
        root / "docs" / "cluster-sketch.yaml",
    ):
        assert not plan_migration(path).needed
    parse_config((root / "cluster.yaml").read_text(), root / "cluster.yaml")
