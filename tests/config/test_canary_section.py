"""The section `canary`: what cannot be tried is told with its place; what differs and how to keep it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.canary_kept import differences, to_keep
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import draft_specs, engine_options, worker_specs
from tests.support.config import parse_config

HEAD = "model:\n  source: simulated:toy\n  adapter: simulated\ncluster: {runtime: local}\n"

# (text behind HEAD, line, what the message must hold)
WRONG = [
    ("canary:\n  share: 0.6\n", 6, ["canary.share: must be 0 to 0.5, not 0.6"]),
    ("canary:\n  shar: 0.1\n", 6, ["canary.shar: unknown key", "did you mean 'share'"]),
    ("canary:\n  drafts:\n    - method: sufix\n", 7, ["canary.drafts[0].method", "'suffix'"]),
    ("canary:\n  drafts: [{method: suffix,\n    max_mach: 3}]\n", 7, ["canary.drafts[0].max_mach", "'max_match'"]),
    ("canary:\n  drafts:\n    - {method: suffix, max_match: 99}\n", 7, ["canary.drafts[0].max_match: must be 1 to 32"]),
    ("canary:\n  drafts:\n    - method: model\n", 7, ["canary.drafts[0].source: is missing"]),
    ("canary:\n  speculation:\n    method: of\n", 7, ["canary.speculation.method", "'same'"]),
    ("canary:\n  share: 0.1\n", 5, ["canary:", "is no other than the rest", "canary.speculation.method"]),
    ("canary:\n  share: 0.1\n  drafts: [{method: suffix}]\n", 5, ["is no other than the rest"]),
    (
        "canary:\n  share: 0.1\n  speculation: {method: off}\n  drafts: [{method: suffix, max_match: 2}]\n",
        5,
        ["its drafts are never asked"],
    ),
    ("speculation: {method: off}\ncanary: {share: 0.1, speculation: {method: off}}\n", 6, ["off for everybody"]),
    ("drafts: []\ncanary: {share: 0.1, speculation: {method: fixed}}\n", 6, ["nobody has a drafter", "canary.drafts"]),
    (
        "canary:\n  share: 0.1\n  speculation: {method: off}\n  most_requests: 10\n",
        8,
        ["canary.most_requests: must be at least least_requests, which is 50"],
    ),
    (
        "canary:\n  share: 0.1\n  drafts:\n    - method: model\n      source: simulated:toy\n      adapter: auto\n",
        10,
        ["canary.drafts[0].adapter: no plan chooses for it"],
    ),
    (
        "speculation: {method: off}\ncanary: {share: 0.1, speculation: {method: auto}}\n"
        "drafts:\n  - method: model\n    source: simulated:toy\n    device: auto\n    adapter: simulated\n",
        10,
        ["drafts[0].device: no plan chooses for it"],
    ),
    (
        "canary:\n  share: 0.1\n  drafts:\n    - {method: model, source: none.gguf}\n",
        8,
        ["canary.drafts[0].source:", "none.gguf"],
    ),
    (
        "canary:\n  share: 0.1\n  drafts:\n    - {method: model, source: simulated:toy, adapter: simulated, host: x}\n",
        8,
        ["canary.drafts[0].host: goes with process: own"],
    ),
]


def write_config(directory: Path, tail: str) -> Path:
    path = directory / "c.yaml"
    path.write_text(HEAD + tail)
    return path


@pytest.mark.parametrize(("tail", "line", "words"), WRONG, ids=[", ".join(case[2])[:40] for case in WRONG])
def test_what_cannot_be_tried_is_told_with_its_place(tmp_path, tail, line, words):
    path = write_config(tmp_path, tail)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    found = str(caught.value)
    assert found.startswith(f"{path}:{line}: ")
    assert "\n" not in found
    assert all(word in found for word in words), found


def test_there_is_none_unless_it_is_asked_for(tmp_path):
    config = load_config(write_config(tmp_path, "canary: {speculation: {method: off}}\n"))
    assert engine_options(config, tmp_path).canary is None


@pytest.mark.parametrize(
    ("tail", "depth", "fixed", "drafters"),
    [
        ("canary: {share: 0.1, speculation: {method: off}}", 0, False, None),
        ("canary: {share: 0.1, speculation: {method: fixed, num_speculative_tokens: 3}}", 3, True, None),
        ("canary: {share: 0.1, speculation: {num_speculative_tokens: 20}}", 20, False, None),
        ("canary: {share: 0.1, drafts: [{method: suffix, max_match: 2}]}", 12, False, ["canary-suffix"]),
        ("speculation: {method: off}\ncanary: {share: 0.1, speculation: {method: auto}}", 12, False, ["suffix"]),
    ],
)
def test_what_is_other_reaches_the_worker(tmp_path, tail, depth, fixed, drafters):
    found = engine_options(load_config(write_config(tmp_path, f"{tail}\n")), tmp_path)
    assert found.canary is not None
    assert (found.canary.max_depth, found.canary.fixed_depth) == (depth, fixed)
    own = found.canary.drafters
    assert (None if own is None else [one.name for one in own]) == drafters
    assert found.deepest == max(depth, found.max_depth, found.predicted_depth)


def test_a_draft_of_the_canarys_own_gets_its_threads_and_its_worker(tmp_path):
    draft = "{method: model, source: 'simulated:toy', adapter: simulated"
    text = f"{HEAD}devices: {{threads: 3}}\ncanary:\n  share: 0.1\n  drafts: [{draft}}}, {draft}, process: own}}]\n"
    config = parse_config(text, tmp_path / "c.yaml")
    options = engine_options(config, tmp_path)
    (target,) = worker_specs(options, config)
    assert [one["model"]["threads"] for one in target.options["canary"]["drafters"]] == [3, 3]
    assert [one.name for one in draft_specs(options, config)] == ["canary-model-2"]


def test_what_differs_and_how_to_keep_it(tmp_path):
    path = write_config(
        tmp_path,
        "speculation:\n  num_speculative_tokens: 8\n"
        "canary:\n  share: 0.1\n  speculation: {method: fixed, num_speculative_tokens: 4}\n"
        "  drafts:\n    - {method: suffix, max_match: 2}\n",
    )
    config = load_config(path)
    assert differences(config) == [
        "speculation.method: auto -> fixed",
        "speculation.num_speculative_tokens: 8 -> 4",
        "drafts: suffix -> suffix (max_match 2)",
    ]
    assert to_keep(config, path) == [
        "c.yaml:5: speculation.method: fixed (a new line)",
        "c.yaml:6: speculation.num_speculative_tokens: 4",
        "c.yaml: drafts: what stands under canary.drafts (line 10) (a new line)",
        "c.yaml:7: canary: take the section out",
    ]
