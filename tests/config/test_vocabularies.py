"""A draft of another vocabulary is refused before anything is loaded, with its line and the ways out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.contract import ModelRefused
from adapters.hf_directory import TARGET_FINGERPRINT
from adapters.vocabulary import vocabulary_at_hand
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from tests.support import tiny_models
from tests.support.tiny_gguf import Tiny, write

WORDS = ["<s>", "a", "b", "ab"]


def write_gguf(path: Path, tokens: list[str]) -> Path:
    write(path, Tiny("llama", vocabulary=len(tokens), layers=1), tokens=tokens)
    return path


def write_config(directory: Path, target: str, draft: str, extra: str = "") -> Path:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model:\n  source: {target}\ndrafts:\n  - method: suffix\n  - method: model\n    source: {draft}\n{extra}"
    )
    return path


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["<s>", "a", "c", "ab"], "id 2: 'b' and 'c'"),
        (["<s>", "a", "b"], "the draft's 3, and the first that differs is id 3: 'ab' and none"),
        ([*WORDS, "<|tool|>"], "id 4: none and '<|tool|>'"),
    ],
)
def test_another_vocabulary_is_refused_with_line_and_way_out(tmp_path, tokens, words):
    write_gguf(tmp_path / "target.gguf", WORDS)
    write_gguf(tmp_path / "draft.gguf", tokens)
    path = write_config(tmp_path, "target.gguf", "draft.gguf")
    with pytest.raises(ConfigError) as told:
        load_config(path)
    assert str(told.value).startswith(f"{path}:6: drafts[1].source: draft.gguf: the target's vocabulary has 4 tokens")
    assert words in str(told.value)
    assert str(told.value).endswith("or set mismatched_vocabulary: translate")
    assert load_config(write_config(tmp_path, "target.gguf", "draft.gguf", "    mismatched_vocabulary: translate\n"))
    assert load_config(path.with_name("cluster.yaml"), sources=False)


@pytest.mark.parametrize("tokens", [WORDS, [*WORDS, "[PAD4]", "<unused1>"]])
def test_the_same_vocabulary_and_a_padded_one_are_served(tmp_path, tokens):
    write_gguf(tmp_path / "target.gguf", WORDS)
    write_gguf(tmp_path / "draft.gguf", tokens)
    for target, draft in (("target.gguf", "draft.gguf"), ("draft.gguf", "target.gguf")):
        assert load_config(write_config(tmp_path, target, draft)).drafts[1].method == "model"


def test_a_model_of_the_hub_is_left_to_the_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_gguf(tmp_path / "target.gguf", WORDS)
    assert vocabulary_at_hand("hf:org/name", tmp_path) is None
    assert load_config(write_config(tmp_path, "target.gguf", "hf:org/name"))


def test_a_vocabulary_is_read_the_same_from_every_format(tmp_path):
    directory = tiny_models.write_model(tmp_path / "tiny", "llama3")
    texts = vocabulary_at_hand("tiny", tmp_path)
    assert texts is not None
    assert len(texts) == tiny_models.VOCABULARY
    write_gguf(tmp_path / "same.gguf", texts)
    assert vocabulary_at_hand(str(tmp_path / "same.gguf"), tmp_path) == texts
    assert load_config(write_config(tmp_path, directory.name, "same.gguf"))
    write(tmp_path / "none.gguf", Tiny("llama"), {"tokenizer.ggml.tokens": None})
    with pytest.raises(ModelRefused, match=r"none\.gguf: it has no vocabulary"):
        vocabulary_at_hand("none.gguf", tmp_path)


def test_a_draft_without_a_tokenizer_says_whose_it_is(tmp_path):
    directory = tiny_models.write_model(tmp_path / "tiny", "llama3")
    (directory / "tokenizer.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    write_gguf(tmp_path / "target.gguf", WORDS)
    path = write_config(tmp_path, "target.gguf", "tiny")
    for declared, served in ((vocabulary_fingerprint(WORDS), True), ("0123456789abcdef", False)):
        config[TARGET_FINGERPRINT] = declared
        (directory / "config.json").write_text(json.dumps(config))
        if served:
            assert load_config(path)
            continue
        with pytest.raises(ConfigError, match=rf"cluster\.yaml:6: drafts\[1\]\.source: .*fingerprint {declared}"):
            load_config(path)


def test_the_simulated_model_has_a_vocabulary_too():
    texts = vocabulary_at_hand("simulated:toy", Path())
    assert texts is not None
    assert (len(texts), texts[65], texts[256]) == (272, "A", "<|end|>")
    from adapters.tokenizer import Tokenizer

    assert Tokenizer.bytes_only().vocabulary_size == len(texts)
