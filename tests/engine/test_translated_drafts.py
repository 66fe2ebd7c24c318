"""Drafts of another vocabulary: whatever is translated, and however badly, the target's tokens come out."""

from __future__ import annotations

import random
import zlib
from itertools import accumulate

import pytest

from adapters.tokenizer import Tokenizer
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import NO_HINTS, Draft
from orchestrator.worker.drafting.retokenize import Bridge
from orchestrator.worker.drafting.translate import TranslatingDrafter
from policies.sampling import Sampling
from policies.sampling import Sampling as Chosen
from tests.support import vocabularies
from tests.support.loops import decode, loop_over, toy

END = 256
CONTROLS = ["<pad>", "<bos>", "<|end|>"]


class Seer:
    """A drafter that knows the answers' texts, in its own vocabulary, and is wrong in `wrong` of its tokens."""

    name = "seer"

    def __init__(self, tokenizer: Tokenizer, answers: dict[str, bytes], *, wrong: float) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._wrong = wrong
        self.held: dict[str, list[int]] = {}
        self.samplings: set[Chosen] = set()
        self.begun = self.extended = 0

    def begin(self, key, tokens, sampling, hints=NO_HINTS):
        self.begun += 1
        self.held[key] = list(tokens)
        self.samplings.add(sampling)

    def extend(self, key, tokens):
        self.extended += 1
        self.held[key].extend(tokens)

    def propose(self, asks):
        return [self._draft(ask.key, ask.limit) for ask in asks]

    def _draft(self, key: str, limit: int) -> Draft:
        begin = [self._tokenizer.bos_id] if self._tokenizer.adds_bos else []
        held = self.held[key]
        assert held[: len(begin)] == begin
        text = b"".join(self._tokenizer.token_bytes(token) for token in held[len(begin) :])
        whole = self._answers[key]
        assert whole.startswith(text), "the drafter's text is the target's"
        rest = whole[len(text) :].decode()
        tokens = self._tokenizer.encode_behind(rest, special=True)[:limit]
        chosen = random.Random(zlib.crc32(text))
        wrong = [chosen.random() < self._wrong for _ in tokens]
        size = self._tokenizer.vocabulary_size
        said = [chosen.randrange(size) if bad else token for token, bad in zip(tokens, wrong, strict=True)]
        return Draft(
            tuple(said), tuple(accumulate(said, lambda before, _: before * 0.97, initial=0.97))[:-1], self.name
        )

    def end(self, key, *, keep):
        self.held.pop(key, None)

    def memory_bytes(self):
        return 0

    def states(self):
        return [DrafterState(self.name, "model")]

    def close(self):
        self.held.clear()


def requests(count: int) -> list[Submit]:
    return [
        Submit(
            f"r{index}",
            list(f"Tell me of the world {index} ü".encode())[: -(index % 2) or None],  # some end inside a character
            50,
            Sampling(0.9 if index % 2 else 0.0, top_p=0.95, seed=index),
            stop_tokens=[END],
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Target-only decoding, one request at a time."""
    return {s.request_id: decode(loop_over(toy(), None, running=1), [s])[0][s.request_id] for s in requests(8)}


@pytest.fixture(scope="module")
def answers(expected) -> dict[str, bytes]:
    """Prompts and answers as the draft reads them: with U+FFFD for bytes that are no text."""
    ours = Tokenizer.bytes_only()
    return {
        s.request_id: ours.decode([*s.prompt, *expected[s.request_id]], skip_special=False).encode()
        for s in requests(8)
    }


@pytest.fixture(scope="module", params=["byte-level", "pieces"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "pieces":
        return vocabularies.pieces(directory, controls=CONTROLS, prefix=False)
    return vocabularies.byte_level(directory, controls=CONTROLS)


@pytest.mark.parametrize("running", [1, 3, 8])
@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_no_draft_of_another_vocabulary_changes_a_token(expected, answers, tokenizer, wrong, running):
    seer = Seer(tokenizer, answers, wrong=wrong)
    drafter = TranslatingDrafter(seer, Bridge(Tokenizer.bytes_only(), tokenizer))
    loop = loop_over(toy(), drafter, running=running)
    out, rounds = decode(loop, requests(8))
    assert out == expected
    assert sum(done.drafted for done in rounds) > 0
    assert seer.samplings == {Chosen()}, "noise of token ids is not shared between vocabularies"
    assert not seer.held
    assert loop.gauges(0).drafters[0].vocabulary == "translated"


def test_right_drafts_are_accepted_in_the_targets_tokens(expected, answers, tokenizer):
    seer = Seer(tokenizer, answers, wrong=0.0)
    drafter = TranslatingDrafter(seer, Bridge(Tokenizer.bytes_only(), tokenizer))
    _, rounds = decode(loop_over(toy(), drafter, running=1), requests(8))
    drafted, accepted = sum(done.drafted for done in rounds), sum(done.accepted for done in rounds)
    # A request that begins inside a character that is none has no drafts before it; all others are right.
    assert accepted > 0.9 * drafted
    assert accepted > 0.6 * sum(map(len, expected.values()))


def test_the_drafter_goes_on_where_its_tokens_stay_and_begins_anew_where_they_do_not(tokenizer):
    ours = Tokenizer.bytes_only()
    seer = Seer(tokenizer, {}, wrong=0.0)
    drafter = TranslatingDrafter(seer, Bridge(ours, tokenizer))
    drafter.begin("a", ours.encode("in the", special=False), Chosen())
    drafter.extend("a", ours.encode(" world", special=False))
    assert (seer.begun, seer.extended) == (1, 1)
    drafter.extend("a", ours.encode("ing", special=False))
    drafter.extend("b", [1, 2])
    expected = tokenizer.encode_behind("in the worlding", special=False)
    assert seer.held["a"][-len(expected) :] == expected
    drafter.end("a", keep=True)
    assert not seer.held
