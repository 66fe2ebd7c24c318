"""EAGLE-3 heads on torch: over pages they say what the formula says, and they never change what the target says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapters import registry
from adapters.contract import (
    LayerRange,
    LoadOptions,
    ModelRefused,
    Precision,
    Segment,
    ShardingAdapter,
    TakesHeads,
    Unsupported,
    silent,
)
from adapters.head_facts import read_head
from adapters.torch_device.head import load_head_network
from adapters.torch_device.model import TorchModel
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.head import HeadDrafter
from policies.sampling import Sampling
from tests.support import tiny_models
from tests.support.loops import decode, loop_over
from tests.support.tiny_decoders import write_decoder
from tests.support.tiny_heads import LAYERS, write_head

ADAPTER = registry.get("torch_device")
OPTIONS = LoadOptions(slots=8, kv_cache_bytes=4 << 20, activations=Precision.FP32, threads=1)
SAYS = range(4, 260, 2)
TOKENS = [int(token) for token in np.random.default_rng(7).integers(4, 260, 90)]


@pytest.fixture(scope="module", params=["llama", "starcoder2"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of a graph of ours, and one of transformers' own class."""
    root = tmp_path_factory.mktemp("target")
    if request.param == "llama":
        return tiny_models.write_model(root / "tiny", "llama", head_dim=16, num_hidden_layers=4)
    return write_decoder(root / "tiny", request.param, num_hidden_layers=4)


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    directory = source.parent / "prepared"
    directory.mkdir()
    ADAPTER.prepare(source, directory, silent)
    return directory


@pytest.fixture
def target(prepared: Path) -> Iterator[TorchModel]:
    loaded = ADAPTER.load(prepared, OPTIONS, silent)
    assert isinstance(loaded, TorchModel)
    yield loaded
    loaded.close()


def drafter_over(target: TorchModel, head: Path, slots: int = 8) -> HeadDrafter:
    assert isinstance(target, TakesHeads)
    state = DrafterState("head", "head")
    loaded = target.attach_head(head, slots)
    return HeadDrafter(loaded, state, SystemClock(), vocabulary=target.spec.vocabulary_size, prefill_ms=1000.0)


def compute_rows(source: Path, head: Path, tokens: list[int]) -> Any:
    """What the formula says behind each token from the second one on, over the hidden states of transformers' own
    model, in one forward: (tokens - 1, outputs)."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    facts = read_head(head)
    network = load_head_network(facts, torch.float32, torch.device("cpu"))
    network.midlayer.self_attn.config._attn_implementation = "eager"
    count = len(tokens) - 1
    with torch.inference_mode():
        # Entry i is the input of layer i, and so the output of the one before.
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        fused = network.fc(torch.cat([states[layer + 1][0, :count] for layer in LAYERS], dim=-1))
        embedded = target.get_input_embeddings()(torch.tensor(tokens[1:]))
        mask = torch.triu(torch.full((1, 1, count, count), -torch.inf), diagonal=1)
        positions = torch.arange(1, count + 1)[None]
        hidden = network.compute_hidden(embedded[None], fused[None], positions, mask)[0]
        return network.lm_head(network.norm(hidden)).numpy()


def test_rows_over_pages_are_those_of_the_formula(source: Path, target: TorchModel, tmp_path: Path) -> None:
    """Chunks, a rollback of target and head, and a prefix that another slot had computed."""
    directory = write_head(tmp_path / "head", SAYS, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]})
    with pytest.raises(ModelRefused, match=r"fc\.weight has the shape \(64, 192\), not \(64, 128\)"):
        target.attach_head(directory, 4)
    directory = write_head(tmp_path / "right", SAYS)
    head = target.attach_head(directory, 4)
    expected = compute_rows(source, directory, TOKENS)
    wrong = [token + 1 for token in TOKENS[60:70]]
    target.forward([Segment(0, 0, TOKENS[:60], (0, 0))])
    target.forward([Segment(0, 60, wrong, (0, 0))])
    target.forward([Segment(0, 60, TOKENS[60:], (0, 0))])
    head.follow(2, 0, len(TOKENS))
    head.forward([Segment(2, 0, TOKENS[:50], (0, 0))])
    head.forward([Segment(2, 50, wrong, (0, 0))])
    rows = head.forward([Segment(2, 50, TOKENS[50:], (0, 40))]).logits
    np.testing.assert_allclose(rows, expected[49:], atol=2e-4)
    target.share(0, TOKENS[:64])
    assert target.attach(1, TOKENS) == 64
    target.forward([Segment(1, 64, TOKENS[64:], (0, 0))])
    target.release(0)
    head.follow(3, 1, len(TOKENS))
    again = head.forward([Segment(3, 0, TOKENS, (50, 90))]).logits
    np.testing.assert_allclose(again, expected[49:], atol=2e-4)


def test_a_guess_goes_on_from_what_the_head_made(target: TorchModel, tmp_path: Path) -> None:
    """Behind the committed tokens a row takes the head's own state, whatever the target holds there."""
    head = target.attach_head(write_head(tmp_path / "head", SAYS), 4)
    target.forward([Segment(0, 0, TOKENS[:20], (0, 0))])
    head.follow(0, 0, 21)
    first = head.forward([Segment(0, 0, TOKENS[:21], (20, 21))]).logits.copy()
    guess = head.forward([Segment(0, 21, TOKENS[21:22], (0, 1))]).logits.copy()
    target.forward([Segment(0, 20, TOKENS[20:40], (0, 0))])  # the target goes on, and its drafts are not judged yet
    again = head.forward([Segment(0, 20, TOKENS[20:21], (0, 1))]).logits
    np.testing.assert_allclose(again, first, atol=1e-4)
    assert np.abs(head.forward([Segment(0, 21, TOKENS[21:22], (0, 1))]).logits - guess).max() < 1e-4
    head.follow(0, 0, 22)
    known = head.forward([Segment(0, 21, TOKENS[21:22], (0, 1))]).logits
    assert np.abs(known - guess).max() > 1e-2, "the target's state of a committed token is not the head's own"


def submits(sampled: bool) -> list[Submit]:
    sampling = [Sampling(0.8, top_p=0.95, seed=seed) if sampled else Sampling() for seed in range(3)]
    prompts = ([5, 6, 7] * 12, TOKENS, [*TOKENS[:64], 9, 9])
    return [
        Submit(f"r{index}", list(prompt), max_tokens=40, sampling=sampling[index], stop_tokens=[], depth=3)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_the_target_says_what_it_says_alone(target: TorchModel, tmp_path: Path, sampled: bool) -> None:
    alone, _ = decode(loop_over(target, None, depth=0), submits(sampled))
    counts = np.bincount([token for tokens in alone.values() for token in tokens])
    often = sorted(int(token) for token in np.argsort(-counts)[:8])
    drafter = drafter_over(target, write_head(tmp_path / "head", often))
    drafted, rounds = decode(loop_over(target, drafter), submits(sampled))
    assert drafted == alone
    assert sum(report.drafted for report in rounds) > 30
    assert sum(report.accepted for report in rounds) > 0, "none of 8 tokens is ever right: choose another seed"
    assert drafter.states()[0].state == "ok"


def test_two_heads_come_and_go_while_the_target_decodes(target: TorchModel, tmp_path: Path) -> None:
    alone, _ = decode(loop_over(target, None, depth=0), submits(False))
    first, second = (write_head(tmp_path / f"{seed}", SAYS, seed=seed) for seed in (1, 2))
    loop, out = loop_over(target, drafter_over(target, first)), dict[str, list[int]]()
    for submit in submits(False):
        assert loop.submit(submit) is None
        out[submit.request_id] = []
    number = 0
    while not loop.idle:
        number += 1
        if number == 8:
            loop.exchange(drafter_over(target, second)).close()
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
    assert out == alone
    assert [states.closed for states in target._states] == [True, False]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": 300}, "config.json: vocab_size is 300, and the target has 320"),
        ({"hidden_size": 64, "target_hidden_size": 32}, r"fc\.weight has the shape"),
        ({"model_type": "medusa"}, "config.json: model_type 'medusa' is no head"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100, and d2t has the shape"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "is no list of numbers"),
        ({"target_hidden_size": "64"}, "target_hidden_size is missing, or no number"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 40]}},
            "layers 0, 1, 40 .*.*has 4",
        ),
        ({"num_attention_heads": 8}, "midlayer.self_attn.o_proj.weight has the shape"),
    ],
)
def test_another_models_head_is_refused(target: TorchModel, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelRefused, match=why):
        target.attach_head(write_head(tmp_path / "head", SAYS, **changes), 4)


def test_a_head_as_wide_as_another_target_is_refused(target: TorchModel, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"config\.json: hidden_size is 32, and the target has 64"):
        target.attach_head(write_head(tmp_path / "head", SAYS, hidden=32), 4)


def test_files_of_other_names_and_kinds(tmp_path: Path) -> None:
    assert read_head(write_head(tmp_path / "converted", SAYS, layer="model.layers.0")).read_output_ids() == tuple(SAYS)
    pickled = write_head(tmp_path / "pickled", SAYS)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"it holds pytorch_model\.bin, which may run code"):
        read_head(pickled)
    with pytest.raises(ModelRefused, match="is no directory"):
        read_head(tmp_path / "nowhere")


def test_a_part_of_the_layers_takes_no_head(prepared: Path, tmp_path: Path) -> None:
    if (prepared / "config.json").exists():
        pytest.skip("transformers' own class is loaded whole")
    assert isinstance(ADAPTER, ShardingAdapter)
    part = ADAPTER.load_layers(prepared, OPTIONS, LayerRange(0, 2), silent)
    assert isinstance(part, TakesHeads)
    with pytest.raises(Unsupported, match="needs all layers of its target in one process"):
        part.attach_head(write_head(tmp_path / "head", SAYS), 4)
    part.close()
