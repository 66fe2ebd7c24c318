"""The tokenizer of a Hugging Face directory: the library's own ids, and the vocabulary of the model's GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from adapters.contract import ModelRefused
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from adapters.tokenizer_hf import vocabulary_texts
from tests.support import tiny_models

CONTROLS = ["<unk>", "<s>", "</s>", "<|eot|>"]
PLAIN = ["▁▁", "<think>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
LETTERS = ["▁", *"abcdehilorstwx,.!\n"]
MERGES = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "▁"), ("w", "o")]
METASPACE_WORDS = [*CONTROLS, *BYTES, *LETTERS, *dict.fromkeys("".join(pair) for pair in MERGES), "<think>"]


def metaspace(style: str) -> Library:
    """A vocabulary in SentencePiece style, as "gemma" (nothing put before a text), "llama" (a space before every
    piece of text) and "mistral" (a space before the beginning only) write it."""
    vocab = {word: index for index, word in enumerate(METASPACE_WORDS)}
    library = Library(models.BPE(vocab=vocab, merges=MERGES, byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    replace = normalizers.Replace(" ", "▁")
    if style == "gemma":
        library.normalizer = replace
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif style == "llama":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS[:3]])
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in [CONTROLS[3], *PLAIN]])
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return library


def write(directory: Path, library: Library, vocabulary: int, **named: Any) -> Path:
    config = tiny_models.config_of("llama3", vocab_size=vocabulary, eos_token_id=[2], bos_token_id=1)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | named))
    library.save(str(directory / "tokenizer.json"))
    return directory


def prepare_tokenizer(source: Path) -> Tokenizer:
    target = source.with_name(f"{source.name}-prepared")
    target.mkdir()
    TokenizerRecipe().prepare(source, target, lambda *_: None)
    return Tokenizer.load(target)


def fingerprint(source: Path) -> str:
    meta = json.loads((source.with_name(f"{source.name}-prepared") / "tokenizer.meta.json").read_text())
    return str(meta["vocabulary_fingerprint"])


@pytest.mark.parametrize("style", ["gemma", "llama", "mistral"])
@pytest.mark.parametrize(
    "text", ["hello", "<s>hello hello</s>", "a  hello\nü日", "<|eot|>hello<think>x", "<s>[hello]</s> hello<s>", " "]
)
def test_ids_are_the_librarys_and_text_comes_back(tmp_path: Path, style: str, text: str) -> None:
    library = metaspace(style)
    tokenizer = prepare_tokenizer(write(tmp_path / style, library, 320))
    ids = tokenizer.encode(text, special=True)
    assert ids == library.encode(text, add_special_tokens=False).ids
    decoded = tokenizer.decode(ids, skip_special=False)
    # What a vocabulary puts before a text is part of its ids, and comes back as a space.
    assert decoded.replace(" ", "") == text.replace(" ", "")
    assert style != "gemma" or decoded == text
    stream = tokenizer.decoder()
    assert "".join(stream.push([index]) for index in ids) + stream.flush() == tokenizer.decode(ids)


def test_facts_of_a_metaspace_vocabulary(tmp_path: Path) -> None:
    source = write(tmp_path / "m", metaspace("gemma"), 320, chat_template=[{"name": "default", "template": "{{ 1 }}"}])
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    tokenizer = prepare_tokenizer(source)
    assert tokenizer.eos_ids == {2, 3}
    assert (tokenizer.bos_id, tokenizer.vocabulary_size) == (1, 320)
    assert tokenizer.encode_prompt("", special=False) == [1]  # the post-processor's begin token
    assert tokenizer.token_bytes(METASPACE_WORDS.index("<0x0A>")) == b"\n"
    assert tokenizer.token_bytes(METASPACE_WORDS.index("▁▁")) == b"  "
    assert tokenizer.token_bytes(319) == b""
    assert tokenizer.render_chat([]) == "1"
    assert 3 not in tokenizer.encode("<|eot|>", special=False)  # a control token, though its file calls it plain
    assert METASPACE_WORDS.index("<think>") in tokenizer.encode("a<think>", special=False)


def test_a_byte_level_vocabulary_is_that_of_its_gguf_file(tmp_path: Path) -> None:
    """The same vocabulary in both formats: one fingerprint, the same ids for the same text."""
    directory = tiny_models.write_model(tmp_path / "hf", "llama3")
    texts = vocabulary_texts(directory, tiny_models.VOCABULARY)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    kinds = [3] * len(tiny_models.CONTROLS) + [1] * (len(texts) - len(tiny_models.CONTROLS))
    writer.add_token_types([5 if text.startswith("[PAD") else kind for text, kind in zip(texts, kinds, strict=True)])
    writer.add_token_merges([" ".join(pair) for pair in tiny_models.MERGES])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs, ours = prepare_tokenizer(tmp_path / "m.gguf"), prepare_tokenizer(directory)
    assert fingerprint(directory) == fingerprint(tmp_path / "m.gguf")
    assert ours.bos_id == theirs.bos_id
    assert ours.eos_ids == theirs.eos_ids | {0}  # generation_config.json names one more
    for text in ["hello the hello", "<|im_start|>user\nhé<|im_end|>", "  1234\t日本語"]:
        for special in (False, True):
            assert ours.encode(text, special=special) == theirs.encode(text, special=special)
    assert [ours.token_bytes(index) for index in range(320)] == [theirs.token_bytes(index) for index in range(320)]


def test_a_length_to_cut_to_is_not_obeyed(tmp_path: Path) -> None:
    library = metaspace("gemma")
    library.enable_truncation(4)
    library.enable_padding(length=8)
    assert len(prepare_tokenizer(write(tmp_path / "m", library, 320)).encode("hello, " * 9, special=False)) > 20


def test_added_tokens_behind_the_model_are_left_out(tmp_path: Path) -> None:
    """Gemma 3's text models have 262144 rows, and their tokenizer one token more, for pictures."""
    library = metaspace("gemma")
    size = library.get_vocab_size()
    library.add_special_tokens(["<image_soft_token>"])
    tokenizer = prepare_tokenizer(write(tmp_path / "m", library, size))
    assert tokenizer.vocabulary_size == size
    assert max(tokenizer.encode("hello<image_soft_token>", special=True)) < size


def test_a_control_token_in_a_message_is_plain_text(tmp_path: Path) -> None:
    tokenizer = prepare_tokenizer(tiny_models.write_model(tmp_path / "m", "llama3"))
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello<|im_end|>"}])
    assert ids.count(2) == 1
    assert ids[0] == 3
    assert "hello<|im_end|><|im_end|>" in tokenizer.decode(ids, skip_special=False)


def wordpiece() -> Library:
    return Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))  # noqa: S106


@pytest.mark.parametrize(
    ("library", "vocabulary", "words"),
    [
        (wordpiece(), 320, ["tokenizer.json", "WordPiece", "BPE"]),
        (metaspace("gemma"), 100, ["token id", "100 tokens", "do not belong together"]),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, library: Library, vocabulary: int, words: list[str]) -> None:
    with pytest.raises(ModelRefused) as caught:
        prepare_tokenizer(write(tmp_path / "m", library, vocabulary))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "BPE"}}', '{"model": 3}', "[]"])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    directory = write(tmp_path / "m", metaspace("gemma"), 320)
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
        prepare_tokenizer(directory)


@pytest.mark.parametrize("change", [{"merges": []}, {"merges": None}])
def test_a_tokenizer_without_merges_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    directory = write(tmp_path / "m", metaspace("gemma"), 320)
    parsed = json.loads((directory / "tokenizer.json").read_text())
    parsed["model"] |= change
    (directory / "tokenizer.json").write_text(json.dumps(parsed))
    with pytest.raises(ModelRefused, match=r"tokenizer\.json: it has no merges"):
        prepare_tokenizer(directory)
