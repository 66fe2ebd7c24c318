"""One sequence in two vocabularies: bytes agree, and what is kept up step by step equals what is encoded at once."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.worker.drafting.retokenize import LONGEST_WINDOW_BYTES, Bridge, DraftText, retokenize_draft
from tests.support import vocabularies

OURS = ["<|end_of_text|>", "<|begin|>", "<|im_end|>", "<|tool|>"]
THEIRS = ["<pad>", "<bos>", "<eos>", "<|tool|>"]
KINDS = ["bytes", "gemma", "llama2", "toy"]
PAIRS = list(permutations(KINDS, 2))
# SentencePiece writes a space as U+2581, so a text that has one comes back with a space.
TEXTS = st.text(alphabet=st.sampled_from("  \n.,!'19abehlotrwding日本é🙂"), max_size=60) | st.text(
    st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=20
)
WORDS = st.lists(st.sampled_from(["the", "hello", "world,", "and", "日本", "it's", "ü", "12.", "(wo)"]), max_size=12)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    def at(name: str):
        return tmp_path_factory.mktemp(name)

    return {
        "bytes": vocabularies.byte_level(at("bytes"), controls=OURS),
        "gemma": vocabularies.pieces(at("gemma"), controls=THEIRS, prefix=False),
        "llama2": vocabularies.pieces(at("llama2"), controls=THEIRS, prefix=True),
        "toy": Tokenizer.bytes_only(),
    }


def build_bridge(tokenizers: dict[str, Tokenizer], pair: tuple[str, str]) -> Bridge:
    return Bridge(tokenizers[pair[0]], tokenizers[pair[1]])


def spell(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in tokens)


def text_of(bridge: Bridge, tokens: list[int]) -> bytes:
    """The bytes of a draft's tokens; its begin token is no text."""
    begin = [bridge.draft.bos_id] if bridge.draft.adds_bos else []
    assert tokens[: len(begin)] == begin
    return spell(bridge.draft, tokens[len(begin) :])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=60)
@given(text=TEXTS, data=st.data())
def test_the_drafts_text_is_the_targets_however_it_comes(tokenizers, pair, text, data):
    bridge = build_bridge(tokenizers, pair)
    committed = bridge.target.encode(text, special=False)
    cut = data.draw(st.integers(0, len(committed)))
    known = DraftText(bridge)
    known.extend(committed[:cut])
    for token in committed[cut:]:
        known.extend([token])
    assert text_of(bridge, known.tokens) + known.pending == spell(bridge.target, committed)
    assert all(0 <= token < bridge.draft.vocabulary_size for token in known.tokens)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=60)
@given(words=WORDS)
def test_tokens_kept_up_are_those_of_the_whole_text(tokenizers, pair, words):
    bridge = build_bridge(tokenizers, pair)
    text = " ".join(words)
    committed = bridge.target.encode_behind(text, special=False)
    known = DraftText(bridge)
    for token in committed:
        known.extend([token])
    begin = [bridge.draft.bos_id] if bridge.draft.adds_bos else []
    assert known.tokens == begin + bridge.draft.encode_behind(text, special=False)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=100)
@given(before=TEXTS, after=TEXTS, cut=st.integers(0, 3), data=st.data())
def test_a_proposal_continues_what_is_committed(tokenizers, pair, before, after, cut, data):
    """The committed tokens may end inside a character, and the proposal may be anything."""
    bridge = build_bridge(tokenizers, pair)
    committed = bridge.target.encode(before, special=False)
    committed = committed[: len(committed) - cut]
    known = DraftText(bridge)
    known.extend(committed)
    rest = known.pending + after.encode()
    drafted = bridge.draft.encode_behind(after, special=False)
    if known.pending:  # go on inside the character where the draft has bytes for it
        drafted = bridge.draft.encode_behind("🙂日é"[data.draw(st.integers(0, 2))] + after, special=False)
        rest = spell(bridge.draft, drafted)
    made = retokenize_draft(bridge, known, drafted, [0.5] * len(drafted))
    assert len(made.tokens) == len(made.confidences)
    assert all(0 <= token < bridge.target.vocabulary_size for token in made.tokens)
    assert all(0.0 <= confidence <= 1.0 for confidence in made.confidences)
    assert 0 <= made.loose <= len(made.tokens)
    together = known.pending + spell(bridge.target, made.tokens)
    if made.tokens:
        assert rest.startswith(together)
    elif not known.pending:
        assert not rest or not drafted or not bridge.target.encode_behind(after, special=True)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, 10_000), max_size=12), before=st.lists(st.integers(0, 10_000), max_size=12))
def test_any_tokens_are_answered(tokenizers, pair, tokens, before):
    """A model may say what is no text at all."""
    bridge = build_bridge(tokenizers, pair)
    known = DraftText(bridge)
    known.extend(token % bridge.target.vocabulary_size for token in before)
    assert all(0 <= token < bridge.draft.vocabulary_size for token in known.tokens)
    drafted = [token % bridge.draft.vocabulary_size for token in tokens]
    made = retokenize_draft(bridge, known, drafted, [0.9] * len(drafted))
    assert all(0 <= token < bridge.target.vocabulary_size for token in made.tokens)


def test_confidences_multiply_over_the_tokens_that_begin_inside(tokenizers):
    bridge = build_bridge(tokenizers, ("bytes", "toy"))
    drafted = list(b" hello the")
    made = retokenize_draft(bridge, DraftText(bridge), drafted, [0.9] * 6 + [0.5] * 4)
    assert [bridge.target.token_bytes(token) for token in made.tokens] == [b" hello", b" the"]
    assert made.confidences == pytest.approx([0.9**6, 0.5**4])
    assert made.loose == 1
    back = build_bridge(tokenizers, ("toy", "bytes"))
    words = retokenize_draft(back, DraftText(back), back.draft.encode(" hello the", special=False), [0.9, 0.5])
    assert words.tokens == drafted
    assert words.confidences == pytest.approx([0.9, 1, 1, 1, 1, 1, 0.5, 1, 1, 1])


def test_control_tokens_of_one_name_are_one_and_others_are_text(tokenizers):
    bridge = build_bridge(tokenizers, ("bytes", "gemma"))
    target, draft = bridge.target, bridge.draft
    committed = target.encode("the<|tool|>the<|im_end|>", special=True)
    assert committed[-1] == 2
    known = DraftText(bridge)
    known.extend(committed)
    assert draft.decode(known.tokens, skip_special=False) == "<bos>the<|tool|>the<|im_end|>"
    assert known.tokens.count(3) == 1
    assert known.end == 2
    drafted = draft.encode_behind("the<|tool|>a<|im_end|>", special=True)
    assert retokenize_draft(bridge, known, drafted, [1.0] * len(drafted)).tokens == target.encode(
        "the<|tool|>a<|im_end|>", special=True
    )
    # The draft's own end of a text is the target's end of a turn.
    assert retokenize_draft(bridge, known, [*draft.encode_behind("the", special=False), 2], [1.0] * 3).tokens[-1] == 2


def test_the_targets_begin_token_is_left_to_the_draft(tokenizers):
    bridge = build_bridge(tokenizers, ("gemma", "bytes"))
    known = DraftText(bridge)
    known.extend(bridge.target.encode_prompt("the", special=False))
    assert known.tokens == bridge.draft.encode("the", special=False)


def test_text_without_spaces_is_not_encoded_again_and_again(tokenizers):
    bridge = build_bridge(tokenizers, ("bytes", "gemma"))
    longest = 0

    class Counting:
        def __getattr__(self, name):
            return getattr(bridge.draft, name)

        def encode_behind(self, text: str, *, special: bool) -> list[int]:
            nonlocal longest
            longest = max(longest, len(text.encode()))
            return bridge.draft.encode_behind(text, special=special)

    counted = Bridge(bridge.target, bridge.draft)
    counted.draft = Counting()  # type: ignore[assignment]
    text = "日本語.abcü" * 200
    known = DraftText(counted)
    for token in bridge.target.encode(text, special=False):
        known.extend([token])
    assert bridge.draft.decode(known.tokens[1:]) == text
    assert 0 < longest <= LONGEST_WINDOW_BYTES + 8
