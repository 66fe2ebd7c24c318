"""SentencePiece vocabularies of GGUF files: the ids that SentencePiece's own rule gives, and text that comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import ModelRefused
from adapters.tokenizer import Tokenizer
from tests.support.llama_cpp_ids import begin_vocabulary
from tests.support.vocabularies import write_vocabulary

BYTES = [f"<0x{value:02X}>" for value in range(256)]
# Scores fall as SentencePiece's BPE trainer gives them: in the order in which joins were learnt, letters last.
JOINS = ["▁t", "he", "in", "▁the", "▁▁", "er", "▁in", "ing", "▁a", "an", "and", "▁and", "her", "▁▁▁▁", "ther", "日本"]
LETTERS = [*"▁theinrgad日本"]
WORDS = JOINS + LETTERS
CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
PLAIN = ["\n", "\n\n", "<table>"]
TOKENS = [*CONTROLS, *PLAIN, *BYTES, *WORDS]
KINDS = [3] * len(CONTROLS) + [4] * len(PLAIN) + [6] * len(BYTES) + [1] * len(WORDS)
SCORES = [0.0] * (len(TOKENS) - len(WORDS)) + [-float(rank) for rank in range(len(WORDS))]


def tokenizer(directory: Path, *, prefix: bool, scores: list[float] | None = None) -> Tokenizer:
    writer = begin_vocabulary(directory / "v.gguf")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_scores(SCORES if scores is None else scores)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(prefix)
    return write_vocabulary(writer, directory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("spm"), prefix=False)


def join_pieces(text: str) -> list[str]:
    """Join the neighbours with the best score, the leftmost of them, until none can be joined."""
    parts = list(text.replace(" ", "▁"))
    while True:
        best = (
            min(
                (JOINS.index(whole), at) if (whole := parts[at] + parts[at + 1]) in JOINS else (len(JOINS), at)
                for at in range(len(parts) - 1)
            )
            if len(parts) > 1
            else (len(JOINS), 0)
        )
        if best[0] == len(JOINS):
            return parts
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]


@settings(max_examples=300)
@given(text=st.text(alphabet=" theinrgad日本", min_size=1, max_size=24))
def test_ids_follow_sentencepieces_rule(plain: Tokenizer, text: str) -> None:
    expected = [TOKENS.index(part) for part in join_pieces(text)]
    assert plain.encode(text, special=False) == expected


@settings(max_examples=200)
@given(text=st.text(max_size=24))
def test_any_text_comes_back(plain: Tokenizer, text: str) -> None:
    ids = plain.encode(text, special=False)
    assert plain.decode(ids, skip_special=False) == text.encode("utf-8", "replace").decode()


def test_bytes_stand_in_for_letters_that_are_missing(plain: Tokenizer) -> None:
    ids = plain.encode("tü", special=False)
    assert [plain.token_bytes(index) for index in ids] == [b"t", b"\xc3", b"\xbc"]


def test_added_tokens_and_controls(plain: Tokenizer) -> None:
    ids = plain.encode("<start_of_turn>the\n\n\nand<table>", special=True)
    assert [TOKENS[index] for index in ids] == ["<start_of_turn>", "t", "he", "\n\n", "\n", "and", "<table>"]
    assert plain.encode_prompt("the", special=False)[0] == plain.bos_id == 2
    assert plain.eos_ids == {1, 5}


def test_a_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    with_prefix = tokenizer(tmp_path, prefix=True)
    assert [TOKENS[index] for index in with_prefix.encode("the", special=False)] == ["▁the"]


def test_missing_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"v\.gguf: it lacks its tokens' scores"):
        tokenizer(tmp_path, prefix=False, scores=SCORES[:-1])


@pytest.mark.parametrize("roles", [{}, {"bos": 2**32 - 1, "eos": 2**32 - 1}])
def test_roles_that_a_file_does_not_name_are_llamas(tmp_path: Path, roles: dict[str, int]) -> None:
    """As llama.cpp assumes: it begins with 1 and ends with 2."""
    writer = GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *BYTES, *WORDS])
    writer.add_token_types([2, 3, 3] + [6] * len(BYTES) + [1] * len(WORDS))
    writer.add_token_scores([0.0] * (3 + len(BYTES)) + [-float(rank) for rank in range(len(WORDS))])
    for role, index in roles.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", index)
    vocabulary = write_vocabulary(writer, tmp_path)
    assert vocabulary.bos_id == 1
    assert vocabulary.eos_ids == {2}
    assert vocabulary.encode_prompt("the", special=False)[0] == 1
