"""The ways to cut text that GGUF files name: ids as llama.cpp gives them, and as transformers does.

The ids of llama.cpp stand in cut_ids.json (`tests.support.llama_cpp_ids` records them). The vocabulary there joins
letters across every border that a cut may draw, so a border in another place gives other ids.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.contract import ModelRefused
from adapters.gguf_header import read_header
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from adapters.tokenizer_cuts import list_cuts
from adapters.tokenizer_gguf import check_tokenizer
from tests.support.llama_cpp_ids import list_ids, read_recorded, write_cut_vocabulary

RECORDED = read_recorded()
TEXTS: list[str] = RECORDED["texts"]

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LETTERS = GPT2 | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDS|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDS|"
)
ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT4O = CASED.replace("ENDS", ENDS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN_HANGUL = "[一-龥ࠀ-一가-퟿]+"
BY_THREES = {"type": "Split", "pattern": {"Regex": "(?=(\\d{3})+(?!\\d))"}, "behavior": "Isolated", "invert": False}


def split(*patterns: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]


# The pre_tokenizer of the authors' tokenizer.json, for the cuts whose authors' file is known.
AUTHORS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [GPT2],
    "smollm": [DIGITS, GPT2],
    "starcoder": [DIGITS, GPT2],
    "llama-bpe": [*split(LLAMA3), LETTERS],
    "qwen2": [*split(QWEN2), LETTERS],
    "deepseek-r1-qwen": [*split(QWEN2), LETTERS],
    "qwen35": [
        *split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        LETTERS,
    ],
    "tekken": [
        *split(CASED.replace("ENDS", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        LETTERS,
    ],
    "gpt-4o": [*split(GPT4O), LETTERS],
    "llama4": [*split(GPT4O), LETTERS],
    "tiny_aya": [*split(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O), LETTERS],
    "deepseek-coder": [*split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_HANGUL), DIGITS, LETTERS],
    "deepseek-v3": [*split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ\u30a0-ヿ]+", MARKED), LETTERS],
    "bailingmoe": [
        *split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
            r"\s+(?!\S)|\s+"
        ),
        LETTERS,
    ],
    "seed-coder": [
        *split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}"
            "\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        LETTERS,
    ],
    "minicpm5": [*split(r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), LETTERS],
    "bloom": [*split(" ?[^(\\s|[.,!?…。，、।۔،])]+"), LETTERS],  # noqa: RUF001
    "superbpe": [*split(r"\p{N}+"), BY_THREES, LETTERS],
    "kimi-k2": [
        *split(
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        LETTERS,
    ],
}
COMPOSED = {"qwen2", "deepseek-r1-qwen", "qwen35", "f2llmv2"}


def is_decomposed(text: str) -> bool:
    return not unicodedata.is_normalized("NFC", text)


def has_marks_or_case(text: str) -> bool:
    """Whether letters have a case beyond ASCII, or are marked: std::regex of llama.cpp knows neither."""
    return any(ord(letter) > 127 and unicodedata.category(letter) in {"Lu", "Ll", "Lt", "Mn", "Mc"} for letter in text)


def has_capitals_within(text: str) -> bool:
    """Whether a word has capitals within, too: some expressions of llama.cpp take all letters for one kind."""
    return has_marks_or_case(text) or re.search("[a-z][A-Z]", text) is not None


def has_capitals_or_numbers(text: str) -> bool:
    return has_capitals_within(text) or any(unicodedata.category(letter)[0] == "N" for letter in text)


# Where the authors' tokenizer and llama.cpp's differ: in what texts, and how many are such. These ids are the authors'.
DIFFERENT: dict[str, tuple[Callable[[str], bool], int]] = {
    **dict.fromkeys(COMPOSED, (is_decomposed, 4)),
    "tekken": (has_marks_or_case, 15),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], (has_marks_or_case, 14)),
    "granite-embed-multi-97m": (has_marks_or_case, 1),
    "kimi-k2": (has_capitals_within, 15),
    "youtu": (has_capitals_within, 2),
    # Digits before letters, and numbers that are no decimal digits.
    **dict.fromkeys(["tiny_aya", "cohere2moe"], (has_capitals_or_numbers, 9)),
    # White space within a range of letters: llama.cpp replaces it before it looks.
    "deepseek-coder": (lambda text: re.search("[\u2000-\u3000]", text) is not None, 4),
    "deepseek-llm": (lambda text: re.search("[\u2000-\u3000]", text) is not None, 5),
    # Decimal digits beyond ASCII.
    "superbpe": (lambda text: any(ord(letter) > 127 and letter.isdecimal() for letter in text), 1),
}


def load(directory: Path, cut: str) -> Tokenizer:
    target = directory / "prepared"
    target.mkdir()
    TokenizerRecipe().prepare(write_cut_vocabulary(directory / "v.gguf", RECORDED, cut), target, lambda *_: None)
    return Tokenizer.load(target)


def authors_tokenizer(cut: str) -> Any:
    """The authors' tokenizer.json with the recorded vocabulary, as transformers loads it."""
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    written: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if cut in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": AUTHORS[cut]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(RECORDED["tokens"])},
            "merges": RECORDED["merges"],
            "ignore_merges": cut in {"llama-bpe", "tekken", "minicpm5"},
        },
    }
    return PreTrainedTokenizerFast(tokenizer_object=Library.from_str(json.dumps(written)))


@pytest.mark.parametrize("cut", list_cuts())
def test_ids_are_those_of_llama_cpp(tmp_path: Path, cut: str) -> None:
    tokenizer = load(tmp_path, cut)
    excused, count = DIFFERENT.get(cut, (lambda _: False, 0))
    different = []
    for text, expected in zip(TEXTS, list_ids(RECORDED, cut), strict=True):
        ids = tokenizer.encode(text, special=False)
        assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if cut in COMPOSED else text)
        if ids != expected:
            different.append(text)
    assert [text for text in different if not excused(text)] == []
    assert len(different) == count


@pytest.mark.parametrize("cut", AUTHORS)
def test_ids_are_those_of_transformers(tmp_path: Path, cut: str) -> None:
    tokenizer, authors = load(tmp_path, cut), authors_tokenizer(cut)
    for text in TEXTS:
        assert tokenizer.encode(text, special=False) == authors.encode(text, add_special_tokens=False), text


def test_the_documentation_names_all_of_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    listed = text.split("not one of these:")[1].split("Chat templates are")[0]
    assert sorted(re.findall("`([^`]+)`", listed)) == list_cuts()


def test_every_name_of_one_cut_is_known() -> None:
    names = "deepseek-r1-qwen megrez falcon3 pixtral llama-v3 tekken deepseek-coder deepseek-llm smaug-bpe dbrx jais"
    names += " chatglm-bpe viking poro-chat exaone exaone4 chameleon minerva-7b trillion hunyuan grok-2 stablelm2 mpt"
    assert set(names.split()) <= set(list_cuts())
    assert len(list_cuts()) > 80


@pytest.mark.parametrize("cut", ["gemma4", "sarvam-moe", "whitespace", "afmoe", "LLAMA3", "martian"])
def test_other_cuts_are_refused_by_name(tmp_path: Path, cut: str) -> None:
    header = read_header(write_cut_vocabulary(tmp_path / "v.gguf", RECORDED, cut))
    with pytest.raises(ModelRefused, match=rf"v\.gguf: it cuts text in the way '{cut}' \(tokenizer\.ggml\.pre\)"):
        check_tokenizer(header)


def test_a_file_that_names_no_cut_has_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    text = "it's 1234ab\n\n x"
    assert load(tmp_path, "").encode(text, special=False) == load(tmp_path / "named", "default").encode(
        text, special=False
    )
