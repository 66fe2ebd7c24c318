"""Text to ids as the model's authors meant it, ids to text the same however they arrive."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import ModelRefused, Unsupported
from adapters.gguf_header import read_header
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import TemplateError, Tokenizer
from adapters.tokenizer_gguf import token_texts

PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
OTHERS = [value for value in range(256) if value not in PRINTABLE]
LETTERS = [chr(0x100 + OTHERS.index(value)) if value in OTHERS else chr(value) for value in range(256)]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "a b", "i t", "' s"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x"]
WORDS = LETTERS + [merge.replace(" ", "") for merge in MERGES]
TOKENS = [*CONTROLS, *WORDS, "<think>", "[PAD1]"]
KINDS = [3] * len(CONTROLS) + [1] * len(WORDS) + [4, 5]


def write_vocabulary(path: Path, **changes: Any) -> Path:
    """Write a GGUF file with a small byte-level vocabulary; a change of None leaves a key out."""
    facts: dict[str, Any] = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "kinds": KINDS, "merges": MERGES}
    facts |= {"eos": 2, "template": TEMPLATE, "bos": 1, "add_bos": None, "eot": None, "name": None} | changes
    writer = GGUFWriter(path, "llama")
    for key, add in {
        "model": writer.add_tokenizer_model,
        "pre": writer.add_tokenizer_pre,
        "tokens": writer.add_token_list,
        "kinds": writer.add_token_types,
        "merges": writer.add_token_merges,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "bos": writer.add_bos_token_id,
        "add_bos": writer.add_add_bos_token,
        "template": writer.add_chat_template,
        "name": writer.add_name,
    }.items():
        if facts[key] is not None:
            add(facts[key])
    for key, index in facts.get("ids", {}).items():
        writer.add_uint32(key, index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def prepare_tokenizer(directory: Path, **changes: Any) -> Path:
    target = directory / "prepared"
    target.mkdir()
    TokenizerRecipe().prepare(write_vocabulary(directory / "v.gguf", **changes), target, lambda *_: None)
    return target


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(index).decode("utf-8", "backslashreplace") for index in ids]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(prepare_tokenizer(tmp_path_factory.mktemp("small")))


def test_merges_digits_and_bytes(small: Tokenizer) -> None:
    assert texts(small, small.encode("hello hello", special=False)) == ["hello", " hello"]
    assert texts(small, small.encode("123", special=False)) == ["1", "2", "3"]  # smollm: digits stand alone
    assert small.encode("é", special=False) == [TOKENS.index(LETTERS[byte]) for byte in "é".encode()]


def test_control_tokens_are_parsed_only_when_asked(small: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert texts(small, small.encode(text, special=True)) == ["a", "<|im_end|>", "b"]
    plain = small.encode(text, special=False)
    assert 2 not in plain
    assert small.decode(plain) == text
    assert small.encode("<|im_end|>x", special=True) == [3]  # the longest one that fits


def test_user_defined_tokens_are_always_parsed(small: Tokenizer) -> None:
    assert texts(small, small.encode("a<think>b", special=False)) == ["a", "<think>", "b"]
    assert small.decode(small.encode("<think>", special=False)) == "<think>"


def test_a_breaker_is_each_token_with_it_and_each_beginning_with_what_follows(small: Tokenizer) -> None:
    breakers = [(texts(small, list(ids)), texts(small, list(rest))) for ids, rest in small.find_breakers("ell")]
    assert breakers == [(["hell", "hello", " hello"], []), (["e", "he"], ["ll"]), ([], ["l"])]
    assert small.find_breakers("ell") is small.find_breakers("ell")
    assert small.find_breakers("\n") == (((TOKENS.index("Ċ"),), ()),)


FILL_MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


@pytest.mark.parametrize("keys", [(), ("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_the_marks_of_a_text_to_fill_in_are_named_or_known(tmp_path: Path, keys: tuple[str, ...]) -> None:
    marks = [f"<|{key}|>" for key in keys] or FILL_MARKS
    tokens, kinds = [*TOKENS, *marks], [*KINDS, *[3] * len(marks)]
    ids = {f"tokenizer.ggml.{key}_token_id": len(TOKENS) + number for number, key in enumerate(keys)}
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, tokens=tokens, kinds=kinds, ids=ids))
    first = len(TOKENS)
    assert tokenizer.fill_tokens is not None
    assert tokenizer.fill_tokens.ends == set(range(first, first + len(marks)))
    prompt = tokenizer.encode_fill("hello", " hello<|im_end|>")
    assert texts(tokenizer, prompt)[:5] == [marks[0], "hello", marks[1], " hello", "<"]
    assert prompt[-1] == first + 2


def test_a_model_without_the_marks_fills_in_nothing(small: Tokenizer) -> None:
    assert small.fill_tokens is None
    with pytest.raises(Unsupported, match="FIM"):
        small.encode_fill("a", "b")


def test_lone_surrogates_count_as_replacement_characters(small: Tokenizer) -> None:
    for special in (False, True):
        assert small.decode(small.encode("a\ud83db", special=special)) == "a\ufffdb"
        assert small.decode(small.encode("\ud83d\ude00", special=special)) == "😀"


def test_facts(small: Tokenizer) -> None:
    assert small.eos_ids == {0, 2}
    assert small.bos_id == 1
    assert small.vocabulary_size == len(TOKENS)
    assert small.token_bytes(2) == b"<|im_end|>"
    assert small.token_bytes(len(TOKENS) - 1) == b""  # unused
    assert small.encode_prompt("a", special=False) == small.encode("a", special=False)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "ab"]),
        ("gpt-2", ["it", "'s", " ", "123", "4", "ab"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", "ab"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "ab"]),
        ("default", ["it", "'", "s", " ", "123", "4", "ab"]),
        ("starcoder", ["it", "'s", " ", "1", "2", "3", "4", "ab"]),
    ],
)
def test_ways_to_cut_text(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, pre=pre))
    assert texts(tokenizer, tokenizer.encode("it's 1234ab", special=False)) == pieces


def test_qwen2_composes_text_and_smollm_does_not(tmp_path: Path, small: Tokenizer) -> None:
    qwen2 = Tokenizer.load(prepare_tokenizer(tmp_path, pre="qwen2"))
    assert qwen2.decode(qwen2.encode("e\u0301", special=False)) == "\u00e9"
    assert small.decode(small.encode("e\u0301", special=False)) == "e\u0301"


def test_begin_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, add_bos=True, eot=3))
    assert tokenizer.encode_prompt("a", special=False) == [1, *tokenizer.encode("a", special=False)]
    assert tokenizer.eos_ids == {0, 2, 3}


@pytest.mark.parametrize("end", ["<turn|>", "<|tool_response>"])
def test_what_ends_a_turn_of_gemma_4_ends_an_answer_whatever_the_file_calls_it(tmp_path: Path, end: str) -> None:
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, tokens=[*CONTROLS, *WORDS, end, "[PAD1]"]))
    assert tokenizer.eos_ids == {0, 2, len(CONTROLS) + len(WORDS)}


NO_ID = 2**32 - 1


@pytest.mark.parametrize(
    ("changes", "bos", "eos"),
    [
        ({"bos": NO_ID}, None, {0, 2}),
        ({"bos": NO_ID, "add_bos": True}, None, {0, 2}),
        ({"bos": NO_ID, "pre": "llama-bpe"}, None, {0, 2}),
        ({"eos": NO_ID, "eot": NO_ID}, 1, {0, 2}),
    ],
)
def test_a_role_without_an_id_is_nobodys(
    tmp_path: Path, changes: dict[str, Any], bos: int | None, eos: set[int]
) -> None:
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, **changes))
    assert tokenizer.bos_id == bos
    assert tokenizer.eos_ids == eos
    assert tokenizer.encode_prompt("a", special=False) == tokenizer.encode("a", special=False)


@pytest.mark.parametrize("places", [(4,), (len(TOKENS) - 1, len(TOKENS) - 2), (0, 3, len(TOKENS) - 1)])
def test_empty_tokens_stand_for_nothing(tmp_path: Path, small: Tokenizer, places: tuple[int, ...]) -> None:
    tokens = ["" if index in places else text for index, text in enumerate(TOKENS)]
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, tokens=tokens, eos=2))
    assert [tokenizer.token_bytes(index) for index in places] == [b""] * len(places)
    assert tokenizer.encode("hello 12", special=True) == small.encode("hello 12", special=True)
    texts = token_texts(read_header(tmp_path / "v.gguf"))
    assert [texts[index] for index in places] == [f"[EMPTY_{index}]" for index in places]  # as llama.cpp calls them


def test_tokens_of_phi3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, name="Phi-3 mini"))
    text = "<|im_start|> \n a<think>\nb<|endoftext|> c"
    assert texts(tokenizer, tokenizer.encode(text, special=True)) == [
        *("<|im_start|>", "a", "<think>", "b", "<|endoftext|>", " ", "c")
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "bert"}, "byte-level BPE"),
        ({"model": None}, "byte-level BPE"),
        ({"pre": "martian"}, "'martian' .tokenizer.ggml.pre., which is none of"),
        ({"tokens": None}, "no vocabulary"),
        ({"kinds": KINDS[:-1]}, "token types"),
        ({"tokens": ["a", *TOKENS[1:-1], "a"]}, "same text"),
        ({"merges": ["a zz"]}, "do not fit"),
        ({"merges": None}, "no merges"),
        ({"merges": []}, "no merges"),
        ({"merges": ["az"]}, "two halves"),
        ({"eos": 100_000}, "outside its vocabulary"),
        ({"bos": 5_000}, "outside its vocabulary"),
    ],
)
def test_refusals_name_the_file_and_the_reason(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=rf"v\.gguf: .*{reason}"):
        prepare_tokenizer(tmp_path, **changes)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.meta.json"])
@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"format": 1}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, file: str, content: str | None) -> None:
    directory = prepare_tokenizer(tmp_path)
    (directory / file).unlink()
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(ModelRefused, match="prepare it again"):
        Tokenizer.load(directory)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    directory = prepare_tokenizer(tmp_path)
    meta = json.loads((directory / "tokenizer.meta.json").read_text())
    meta["vocabulary_fingerprint"] = "0" * 16
    (directory / "tokenizer.meta.json").write_text(json.dumps(meta))
    with pytest.raises(ModelRefused, match="belong together"):
        Tokenizer.load(directory)


def push_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> str:
    decoder = tokenizer.decoder()
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [decoder.push(ids[start:end]) for start, end in pairwise(edges)]
    return "".join(pieces) + decoder.flush()


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 271)), cuts=st.lists(st.integers(0, 1000)))
def test_pushed_in_any_pieces_the_text_is_the_whole_decode(ids: list[int], cuts: list[int]) -> None:
    toy = Tokenizer.bytes_only()
    whole = bytes(index for index in ids if index < 256).decode("utf-8", "replace")
    assert toy.decode(ids) == whole
    assert push_pieces(toy, ids, cuts) == whole
    assert push_pieces(toy, ids, list(range(len(ids)))) == whole


@settings(max_examples=300)
@given(text=st.text(), junk=st.lists(st.integers(0x80, 0xFF), max_size=3), cuts=st.lists(st.integers(0, 1000)))
def test_broken_characters_in_text(text: str, junk: list[int], cuts: list[int]) -> None:
    toy = Tokenizer.bytes_only()
    ids = [*toy.encode(text, special=False), *junk, *toy.encode(text[::-1], special=False)]
    assert push_pieces(toy, ids, cuts) == bytes(ids).decode("utf-8", "replace")


@settings(max_examples=200)
@given(text=st.text())
def test_text_survives_the_small_vocabulary(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text, special=False)) == text
    assert small.decode(small.encode(text, special=True), skip_special=False) == text


def test_unfinished_characters_are_held_back() -> None:
    decoder = Tokenizer.bytes_only().decoder()
    assert [decoder.push([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert decoder.push([0xF0, 0x9F]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_special_tokens_are_skipped_unless_wanted(small: Tokenizer) -> None:
    ids = [1, *small.encode("hello", special=False), 2]
    assert small.decode(ids) == "hello"
    assert small.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"


@pytest.mark.parametrize("index", [-1, 272, 10**9])
def test_ids_outside_the_vocabulary_are_a_callers_mistake(index: int) -> None:
    toy = Tokenizer.bytes_only()
    for call in (toy.token_bytes, lambda token: toy.decode([token]), lambda token: toy.decoder().push([token])):
        with pytest.raises(Unsupported, match="outside the vocabulary of 272"):
            call(index)


def test_rendered_chat(small: Tokenizer) -> None:
    assert small.has_chat_template
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert small.render_chat(messages, add_generation_prompt=False) == text
    assert small.render_chat(messages) == text + "<|im_start|>assistant\n"
    assert small.encode_chat(messages) == small.encode(small.render_chat(messages), special=True)


@settings(max_examples=200)
@given(parts=st.lists(st.sampled_from([*CONTROLS, "<|", "|>", "im_end", "\ufdd0", "\ufdd1", " é", "\n", "<think>"])))
def test_messages_cannot_hold_control_tokens(small: Tokenizer, parts: list[str]) -> None:
    content = "".join(parts)
    ids = small.encode_chat([{"role": "user", "content": content}], add_generation_prompt=False)
    assert [index for index in ids if index < len(CONTROLS)] == [1, 2]
    expected = small.encode("user\n" + content, special=False)
    assert ids == [1, *expected, 2, *small.encode("\n", special=False)]


def test_messages_with_parts_are_guarded_too(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, template=template))
    ids = tokenizer.encode_chat([{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}])
    assert 2 not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_a_template_that_refuses_is_quoted(small: Tokenizer) -> None:
    with pytest.raises(TemplateError, match=r"^no tools here$"):
        small.render_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(TemplateError, match=r"^no tools here$"):
        small.encode_chat([{"role": "tool", "content": "x"}])


def test_without_a_template_the_way_out_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="completions"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_the_toy() -> None:
    toy = Tokenizer.bytes_only()
    assert toy.vocabulary_size == 272
    assert toy.eos_ids == {256}
    assert toy.has_chat_template
    assert toy.encode("é", special=False) == [0xC3, 0xA9]
    assert toy.encode("<|start|>a<|end|>", special=True) == [257, ord("a"), 256]
    assert toy.token_bytes(65) == b"A"
    assert toy.token_bytes(271) == b""
    ids = toy.encode_chat([{"role": "user", "content": "hi<|end|>"}])
    assert (ids.count(257), ids.count(256)) == (2, 1)
    assert toy.decode(ids) == "user\nhi<|end|>assistant\n"
