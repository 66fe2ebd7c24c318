"""Token ids out of streams that leave some out, and out of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import silent
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from orchestrator.worker.endpoint.dialects import Chunk
from orchestrator.worker.endpoint.token_readers import GapReader, PieceIndex, TextReader

pytestmark = pytest.mark.model
LETTERS = "abc XYZ.,0\n äßñÖ ЖдЫ 漢字语の ثعل 🦜🐙🦩👩\u200d"
"""Of which the default model's vocabulary has all bytes."""
TEXTS = st.text(st.sampled_from(LETTERS), min_size=1, max_size=24)


@pytest.fixture(scope="module")
def tokenizer(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    store = ModelStore(tmp_path_factory.mktemp("store"))
    file = resolve(str(default_model_path), Path())
    return Tokenizer.load(store.prepare(file, TokenizerRecipe(), silent))


def stream_as_llama_server(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Chunk]:
    """Return its chunks: one where the whole text is UTF-8, with that token's id alone and the count of all so far."""
    chunks, waiting = [], b""
    for count, token in enumerate(ids, start=1):
        waiting += tokenizer.token_bytes(token)
        try:
            text = waiting.decode()
        except UnicodeDecodeError:
            continue
        chunks.append(Chunk(text, [token], count))
        waiting = b""
    return chunks


@given(text=TEXTS)
def test_what_a_model_writes_as_its_tokenizer_does_comes_back_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, special=False)
    reader = GapReader(tokenizer, PieceIndex(tokenizer))
    read = [token for chunk in stream_as_llama_server(tokenizer, ids) for token in reader.read(chunk)]
    assert tokenizer.decode(read) == text
    assert reader.inexact or read == ids


@given(data=st.data())
def test_gaps_of_any_tokens_have_their_text_and_wrong_ids_are_known(tokenizer: Tokenizer, data: st.DataObject) -> None:
    plain = [token for token in range(tokenizer.vocabulary_size) if token not in tokenizer.control_ids]
    ids = data.draw(st.lists(st.sampled_from(plain[:400]), max_size=12))
    chunks = stream_as_llama_server(tokenizer, ids)
    reader = GapReader(tokenizer, PieceIndex(tokenizer))
    read = [token for chunk in chunks for token in reader.read(chunk)]
    assert tokenizer.decode(read) == "".join(chunk.text for chunk in chunks)
    shown = ids[: chunks[-1].predicted] if chunks else []
    assert reader.inexact or read == shown


@given(texts=st.lists(TEXTS, max_size=6))
def test_text_alone_becomes_ids_of_the_same_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    reader = TextReader(tokenizer)
    ids = [token for text in texts for token in reader.read(Chunk(text))]
    ids += reader.read(Chunk("", finish="stop"))
    assert tokenizer.decode(ids) == "".join(texts)


def test_half_a_character_waits_for_its_rest(tokenizer: Tokenizer) -> None:
    reader = TextReader(tokenizer)
    assert tokenizer.decode(reader.read(Chunk("a\ufffd"))) == "a"
    assert tokenizer.decode(reader.read(Chunk("", finish="stop"))) == "\ufffd"
