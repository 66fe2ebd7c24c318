"""The whole way of a draft on a tiny random target: generate, go on, train, go on, export, load, decode."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider_lab.distill.__main__ import app
from outrider_lab.distill.lines import NOTHING, category, indexes_of, is_held_out, rows_of, split_held_out
from outrider_lab.distill.vocabulary import coverage, most_frequent
from typer.testing import CliRunner, Result

from adapters import registry
from adapters.contract import AdapterUnavailable, LoadOptions, Segment, TakesHeads, silent
from adapters.head_facts import read_head
from adapters.hf_directory import open_weights
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.names import CONVERTING_ADAPTERS
from orchestrator.generating.build import StatisticsJob, build_statistics
from orchestrator.generating.data import DataError, Shards, TargetFacts, Text
from orchestrator.generating.generate import Settings
from orchestrator.generating.progress import ConsoleShow
from orchestrator.generating.prompts import wish
from tests.support import reference_decoder, tiny_models

FACTS = TargetFacts("models/tiny", "tiny", 320, "0123456789abcdef", 512, [2])
TINY = ["--outputs", "64", "--hidden", "64", "--heads", "2", "--mlp", "64", "--layers", "1"]


NO_TORCH = "torch is not installed: pip install 'outrider-lab[distill]'"


def run(*arguments: object) -> Result:
    """Run a command in this process; failures are raised."""
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False, standalone_mode=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny target, its cluster.yaml, and data that it wrote in two runs."""
    here = tmp_path_factory.mktemp("distill")
    tiny_models.write_model(here / "target", "llama", kind="BF16")
    (here / "cluster.yaml").write_text(
        "model:\n  source: target\n  adapter: openvino_rt\n"
        "limits: {kv_cache: 16 MiB, max_batch_rows: 64}\n"
        f"store: {{directory: '{here / 'store'}'}}\n"
    )
    for tokens in (600, 2500):
        settings = Settings(tokens, concurrency=4, max_tokens=24, top=4)
        job = StatisticsJob(settings, here / "cluster.yaml", data=here / "data", output=here / "statistics")
        build_statistics(job, ConsoleShow())
    return here


def text(number: int, tokens: list[int], head: int, chances: float = 0.5) -> Text:
    labels = len(tokens) - head
    top = np.array([[token, 0] for token in tokens[head:]], np.int32).reshape(labels, 2)
    logs = np.log(np.array([[chances, 0.1]] * labels, np.float32)).reshape(labels, 2)
    return Text(number, np.array(tokens, np.int32), head, top, logs.astype(np.float16))


def test_generation_goes_on_where_it_stopped(place: Path) -> None:
    found = list(Shards(place / "data").texts())
    assert sum(len(one.top_ids) for one in found) >= 2500
    assert len(Shards(place / "data").paths()) >= 2
    asked = [(one.number, one.head) for one in found]
    assert len(set(asked)) == len(asked), "a conversation was had twice"
    for one in found:
        assert one.top_ids.shape == (len(one.tokens) - one.head, 4)
        assert (np.diff(one.top_logs.astype(np.float32), axis=1) <= 0).all()
        assert np.exp(one.top_logs.astype(np.float32)).sum(axis=1).max() <= 1.01


def test_the_noted_tokens_are_the_targets_likeliest(place: Path) -> None:
    one = max(Shards(place / "data").texts(), key=lambda one: len(one.top_ids))
    logits = reference_decoder.logits(open_weights(place / "target"), one.tokens.tolist())[one.head - 1 : -1]
    rows = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    rows -= logits.max(axis=1, keepdims=True)
    noted = one.top_logs.astype(np.float32)
    assert np.abs(np.take_along_axis(rows, one.top_ids.astype(np.int64), axis=1) - noted).max() < 0.4
    assert (rows.argmax(axis=1) == one.top_ids[:, 0]).mean() > 0.8  # bfloat16 against float32: near ties


def test_data_of_another_target_is_not_mixed_in(place: Path) -> None:
    with pytest.raises(DataError, match="give another directory"):
        Shards(place / "data").bind(FACTS)


def test_damaged_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run `outrider drafts build --data .*` first"):
        Shards(tmp_path).target()
    (tmp_path / "texts-00000.npz").write_bytes(b"PK\x03\x04 no more")
    with pytest.raises(DataError, match=r"texts-00000\.npz: it is damaged"):
        list(Shards(tmp_path).texts())


def test_prompts_follow_from_their_number_and_vary() -> None:
    first = [wish(number, 7, ["some words of an earlier answer"]) for number in range(200)]
    assert first == [wish(number, 7, ["some words of an earlier answer"]) for number in range(200)]
    assert {one.kind for one in first} == {"own", "composed", "over_text"}
    composed = [one.text for one in first if one.kind == "composed"]
    assert len(set(composed)) > 0.9 * len(composed)
    assert {one.temperature for one in first} == {0.0, 0.7}
    assert wish(3, 7, []).kind == "composed", "nothing was written yet that could be asked about"


def test_prompts_are_none_of_those_that_drafts_are_evaluated_on() -> None:
    lines = (Path(__file__).parents[4] / "tools" / "prompts.jsonl").read_text().splitlines()
    evaluated = {json.loads(line)["turns"][0] for line in lines}
    assert not evaluated & {wish(number, 0, ["a b c"]).text for number in range(5000)}


def test_outputs_are_the_most_frequent_tokens_and_those_that_end_an_answer() -> None:
    total = np.array([5, 0, 9, 9, 1, 0])
    kept = most_frequent(total, 3, always=[1])
    assert kept.tolist() == [1, 2, 3]
    assert coverage(total, kept) == 18 / 24


def test_rows_carry_each_texts_labels() -> None:
    texts = [text(0, [9, 8, 7, 6], head=2), text(1, [5, 4, 3], head=1)]
    rows = rows_of(texts, indexes_of(np.array([4, 6, 7]), 10), 7, np.array([1, 0]))
    assert rows.tokens.tolist() == [[5, 4, 3, 9, 8, 7, 6]]
    assert rows.top_ids[0, :, 0].tolist() == [0, NOTHING, NOTHING, NOTHING, 2, 1, NOTHING]
    assert (rows.chances[0, :, 0] > 0).tolist() == [True, True, False, False, True, True, False]


def test_held_out_conversations_are_not_trained_on() -> None:
    texts = [text(number, [9, 8, 7], head=1) for number in range(500)]
    training, kept = split_held_out(texts)
    assert 5 < sum(map(len, kept.values())) < 50
    assert not {one.number for one in training} & {one.number for texts in kept.values() for one in texts}
    assert all(is_held_out(one.number) and category(one.number) == name for name in kept for one in kept[name])


INTERRUPTED = """
import signal
from orchestrator.generating.generate import interruptible
before = signal.getsignal(signal.SIGINT)
with interruptible() as stopped:
    assert not stopped()
    signal.raise_signal(signal.SIGINT)
    assert stopped()
assert signal.getsignal(signal.SIGINT) is before
"""


def test_an_interrupt_is_taken_up_between_steps() -> None:
    # Of a process of its own: what other tests have left of handlers in this one is not known.
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], check=False).returncode == 0


@pytest.fixture(scope="module")
def draft(place: Path) -> Path:
    """A draft that was trained in two runs, exported."""
    pytest.importorskip("torch", reason=NO_TORCH)
    options = ["--data", place / "data", "--out", place / "checkpoint", *TINY]
    options += ["--batch-tokens", 512, "--row-tokens", 128, "--steps", 30, "--evaluate-every", 30]
    run("train", *options, "--minutes", 0.0001)
    run("train", *options)
    run("export", "--data", place / "data", "--checkpoint", place / "checkpoint", "--out", place / "draft")
    return place / "draft"


def test_training_goes_on_to_the_plans_last_step(place: Path, draft: Path) -> None:
    from outrider_lab.distill.train import State

    state = State.load(place / "checkpoint")
    assert state.step == state.plan.steps == 30
    assert {2} <= set(state.outputs.tolist()), "the draft must be able to end an answer"
    again = run("train", "--data", place / "data", "--out", place / "checkpoint", "--steps", 99)
    assert again.exit_code == 0
    assert State.load(place / "checkpoint").step == 30, "a plan is fixed by its first run"


def test_a_draft_learns_what_its_target_does() -> None:
    pytest.importorskip("torch", reason=NO_TORCH)
    from outrider_lab.distill.draft import Shape
    from outrider_lab.distill.train import Plan, State, agreement
    from outrider_lab.distill.train import run as train

    rng = np.random.default_rng(0)
    # The target counts on, in steps of one or two; the draft has to look back at two tokens to know which.
    steps, starts = rng.integers(1, 3, 60), rng.integers(0, 100, 60)
    texts = [
        text(number, [int((first + step * i) % 100) for i in range(40)], head=2, chances=0.9)
        for number, (first, step) in enumerate(zip(starts, steps, strict=True))
    ]
    state = State.fresh(Shape(128, 64, 64, 1, 2, 1, 64), np.arange(64), Plan(120, 512, 128, 1e-2, warm_up=10))
    assert agreement(state.draft, texts[50:], state.outputs, 128) < 0.1
    train(state, texts[:50], seconds=0.0, tell=lambda *_: None, stopped=lambda: False)
    # It has words for 64 of the 100 tokens only.
    sayable = np.mean(np.concatenate([one.top_ids[:, 0] for one in texts[50:]]) < 64)
    assert 0.9 * sayable < agreement(state.draft, texts[50:], state.outputs, 400) <= sayable


def test_training_stops_where_nothing_gets_better_and_keeps_the_best(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason=NO_TORCH)
    from outrider_lab.distill.cli_train import Looks
    from outrider_lab.distill.train import State

    looks = Looks(every=10, patience=2)
    assert [looks.is_best(share) for share in (0.1, 0.3, 0.2)] == [True, True, False]
    assert not looks.ended
    assert not looks.is_best(0.3)
    assert (looks.ended, looks.best) == (True, 0.3)
    options = ["--steps", 400, "--evaluate-every", 1, "--patience", 3, "--batch-tokens", 64, "--row-tokens", 32]
    run("train", "--data", place / "data", "--out", tmp_path / "out", *options, *TINY, "--learning-rate", 0)
    assert State.load(tmp_path / "out").step == 4, "without learning no look is better than the first"
    assert State.load(tmp_path / "out" / "best").step < 4


def test_two_runs_are_one_run(place: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    from outrider_lab.distill.draft import Shape
    from outrider_lab.distill.train import Plan, State
    from outrider_lab.distill.train import run as train

    training, _ = split_held_out(Shards(place / "data").texts())
    shape = Shape(320, 64, 64, 1, 2, 1, 64)
    outputs = np.arange(64)
    plan = Plan(6, 256, 128, dropout=0.0)

    def go_on(state: State, until: int) -> None:
        train(state, training, seconds=0.0, tell=lambda *_: None, stopped=lambda: state.step >= until)

    whole = State.fresh(shape, outputs, plan)
    go_on(whole, 6)
    first = State.fresh(shape, outputs, plan)
    go_on(first, 3)
    first.save(tmp_path)
    second = State.load(tmp_path)
    go_on(second, 6)
    for one, two in zip(whole.draft.state_dict().values(), second.draft.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("adapter", CONVERTING_ADAPTERS)
def test_every_adapter_computes_what_was_trained(place: Path, draft: Path, adapter: str) -> None:
    import torch
    from outrider_lab.distill.train import State

    runtime = registry.get(adapter)
    try:
        prepared = ModelStore(place / "store").prepare(resolve(str(draft), Path()), runtime, silent)
        model = runtime.load(prepared, LoadOptions(kv_cache_bytes=16 << 20, slots=2, max_batch_rows=64), silent)
    except AdapterUnavailable as missing:
        pytest.skip(str(missing))
    state = State.load(place / "checkpoint")
    tokens = next(iter(Shards(place / "data").texts())).tokens[:40]
    state.draft.eval()
    with torch.no_grad():
        expected = state.draft.lm_head(state.draft.compute_hidden(torch.from_numpy(tokens.astype(np.int64))[None]))[
            0
        ].numpy()
    found = model.forward([Segment(0, 0, tokens.tolist(), (0, len(tokens)))]).logits.copy()
    assert found.shape == expected.shape == (len(tokens), 64)
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.05 * expected.std()
    assert model.spec.output_ids == tuple(int(token) for token in state.outputs)
    model.close()


def test_a_head_learns_what_its_target_does_and_the_runtime_says_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from outrider_lab.distill.head import Bounds, Target, begin, train, write_head

    torch.set_num_threads(1)

    rng = np.random.default_rng(0)
    # As above: the head has to look back, at the target's states or at its own rows.
    steps, starts = rng.integers(1, 3, 60), rng.integers(0, 100, 60)
    texts = [
        text(number, [4 + int((first + step * i) % 100) for i in range(40)], head=2, chances=0.9)
        for number, (first, step) in enumerate(zip(starts, steps, strict=True))
    ]
    facts = replace(FACTS, source=str(tiny_models.write_model(tmp_path / "tiny", "llama")))
    target, lines = Target(facts, tmp_path / "target"), list[str]()
    for count in (20, 80):  # the second run goes on from what the first one wrote
        head = begin(target, facts, np.arange(4, 104), tmp_path / "head")
        train(head, target, texts[:50], texts[50:], Bounds(math.inf, count, 2, 1e-2), lines.append)
        write_head(head, tmp_path / "head")
    assert min(head.agreement) > 0.4, "chance is 1/100"
    assert lines[0].startswith("states of 1536 of 1536 tokens in ")
    model = registry.get("torch_device").load(tmp_path / "target", LoadOptions(slots=2, kv_cache_bytes=1 << 20), silent)
    assert isinstance(model, TakesHeads)
    served, right = model.attach_head(tmp_path / "head", 2), 0
    for known in texts[50:]:
        tokens = known.tokens.tolist()
        model.forward([Segment(0, 0, tokens, (0, 0))])
        served.follow(0, 0, len(tokens))
        rows = served.forward([Segment(0, 0, tokens, (2, 39))]).logits
        right += int((4 + rows.argmax(axis=1) == known.labels[1:]).sum())
        model.release(0)
        served.release(0)
    assert right > 0.4 * 10 * 37
    model.close()


def test_a_head_is_trained_by_a_command(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run("head", "--data", place / "data", "--out", tmp_path / "head", "--outputs", 64, "--steps", 1)
    facts = read_head(tmp_path / "head")
    assert (facts.outputs, facts.layer_ids, facts.hidden) == (64, (1, 1, 0), 64)


def test_the_draft_is_compared_by_the_command_that_compares_drafts(place: Path, draft: Path, outrider) -> None:
    arguments = ("--model", draft, "--limit", 3, "--max-tokens", 24, "--config", place / "cluster.yaml", "--json")
    done = outrider("drafts", "recommend", *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["summary"]["identical"]
    failures = {row["name"]: row["failed"] for row in result["candidates"]}
    assert failures == dict.fromkeys(("none", "control", "suffix", "model draft", "chain"), "")


def test_an_export_does_not_write_over_a_model(place: Path, draft: Path) -> None:
    with pytest.raises(DataError, match="holds a model that is no draft"):
        run("export", "--data", place / "data", "--checkpoint", place / "checkpoint", "--out", place / "target")
