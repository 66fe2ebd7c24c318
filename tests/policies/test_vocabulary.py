"""Vocabularies are compared id by id; only rows that stand for nothing may differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.models.vocabulary import Match, compare

WORDS = st.lists(st.text(alphabet="abĠ▁<>", min_size=1, max_size=4), max_size=20)
PADDING = st.lists(st.sampled_from(["[PAD3]", "<unused7>", "<|reserved_special_token_1|>", "<pad>", ""]), max_size=5)


@given(words=WORDS)
def test_a_vocabulary_is_identical_to_itself(words):
    assert compare(words, list(words)).match is Match.IDENTICAL


@given(words=WORDS, one=PADDING, other=PADDING)
def test_padding_at_the_end_is_no_difference(words, one, other):
    comparison = compare([*words, *one], [*words, *other])
    assert comparison.match is (Match.IDENTICAL if one == other else Match.PADDED)
    assert (comparison.target_size, comparison.draft_size) == (len(words) + len(one), len(words) + len(other))


@given(words=WORDS, padding=PADDING, at=st.integers(0, 19), other=st.text(alphabet="xyz", min_size=1, max_size=3))
def test_the_first_id_that_means_something_else_is_named(words, padding, at, other):
    at = min(at, len(words))
    changed = [*words[:at], other, *words[at + 1 :]]
    comparison = compare([*words, *padding], changed)
    assert comparison.match is Match.DIFFERS
    assert comparison.first == at
    assert comparison.draft_text == other
    assert comparison.target_text == ([*words, *padding, None])[at]
    turned = compare(changed, [*words, *padding])
    assert (turned.match, turned.first, turned.target_text) == (Match.DIFFERS, at, other)


@given(one=WORDS | PADDING, other=WORDS | PADDING)
def test_both_directions_agree(one, other):
    assert compare(one, other).match is compare(other, one).match


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (["a", "b"], ["a", "c"], "has 2 tokens and the draft's 2, and the first that differs is id 1: 'b' and 'c'"),
        (["a", "<|im_end|>"], ["a"], "id 1: '<|im_end|>' and none"),
        (["a"], ["x" * 99], f"'a' and '{'x' * 32}...'"),
    ],
)
def test_the_difference_is_told_in_one_line(target, draft, words):
    text = compare(target, draft).words()
    assert words in text
    assert "\n" not in text
