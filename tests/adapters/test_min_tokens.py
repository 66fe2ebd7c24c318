"""The least number of tokens is never more than there are, and a text is judged without being encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.min_tokens import measure_min_tokens
from adapters.tokenizer import Tokenizer
from tests.adapters import test_tokenizer as gguf
from tests.adapters import test_tokenizer_hf as hf

TEXTS = st.one_of(
    st.text(max_size=300),
    st.text("0123456789 \n\tabcdefhelo\u2581e\u0301\u00e9<|end>", max_size=300),
    st.lists(st.sampled_from(["the ", "    ", "2024", "\u1100\u1161\u11a8", "e\u0301", "<|end|>", " hello"])).map(
        "".join
    ),
)
EXACT = 10**9
KINDS = ["bytes", "smollm", "qwen2", "gemma", "llama", "mistral"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    def load(kind: str, directory: Path) -> Tokenizer:
        if kind == "bytes":
            return Tokenizer.bytes_only()
        if kind in ("smollm", "qwen2"):
            return Tokenizer.load(gguf.prepare_tokenizer(directory, pre=kind))
        return hf.prepare_tokenizer(hf.write(directory / "x", hf.metaspace(kind), len(hf.METASPACE_WORDS)))

    return {kind: load(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_there_are_never_fewer_tokens(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    least = tokenizer.count_min_tokens(text, EXACT)
    assert least <= len(tokenizer.encode(text, special=True))
    assert least <= len(tokenizer.encode(text, special=False))


@pytest.mark.parametrize("kind", KINDS)
def test_digits_and_letters_count_for_something(tokenizers, kind):
    assert tokenizers[kind].count_min_tokens("0123456789" * 1000, EXACT) >= 1000
    assert tokenizers[kind].count_min_tokens("xyz" * 1000, EXACT) > 100


def test_no_more_is_counted_than_is_enough(tokenizers):
    assert 64 < tokenizers["bytes"].count_min_tokens("0" * 10**7, 64) <= 10**6


@pytest.mark.parametrize(
    "parsed",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Removed"}},
        {"added_tokens": [{"content": "<mask>", "lstrip": True}]},
    ],
)
def test_where_text_is_dropped_on_the_way_nothing_is_claimed(parsed):
    assert measure_min_tokens(parsed, [bytes([value]) for value in range(256)]) is None


def test_characters_that_fall_into_one_unknown_token_claim_nothing():
    model = {"model": {"unk_token": "<unk>", "fuse_unk": True}}
    assert measure_min_tokens(model, [b"a", b"b"]) is None
