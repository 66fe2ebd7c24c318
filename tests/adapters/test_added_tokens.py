"""Added tokens that take white space with them, stand alone only, or are looked for in normalised text."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from adapters.tokenizer import Tokenizer
from tests.adapters.test_tokenizer_hf import metaspace, prepare_tokenizer, write

FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
CONTROLS = ["<s>", "</s>", "<|eot|>", "[INST]", "stop", "<mask>"]
PLAIN = ["<think>", "word", "  ", "</think>"]
STYLES = ["bytes", "composed", "gemma", "llama", "mistral"]
TEXTS = [
    "a <mask> b",
    "a  <mask>\n\n <mask>b<s>  <s>",
    " <s> hello\n<think> \u00a0</think>\u2028x",
    "stop nonstop stops stop. stop_ _stop stop\u0301 \u0301stop stop\u200dx stop² ²stop stopⓐ stop!",
    "word swords word<s>word</s> wordword",
    "\t<|eot|>\t \x1c<|eot|>\x1c \x85[INST]\x85",
    "  <s>  ",
    "",
]
numbers = count()


def build(style: str, flags: dict[str, dict[str, bool]]) -> Library:
    if style in ("bytes", "composed"):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        library = Library(
            models.BPE(vocab={word: index for index, word in enumerate([*letters, "ĠĠ"])}, merges=[("Ġ", "Ġ")])
        )
        library.normalizer = normalizers.NFC() if style == "composed" else None
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    else:
        library = metaspace(style)
    library.add_special_tokens([AddedToken(text, special=True, **flags.get(text, {})) for text in CONTROLS])
    library.add_tokens([AddedToken(text, special=False, **flags.get(text, {})) for text in PLAIN])
    return library


def load(directory: Path, library: Library) -> Tokenizer:
    source = write(directory / str(next(numbers)), library, library.get_vocab_size() + 3)
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": library.token_to_id("</s>")}
    (source / "config.json").write_text(json.dumps(config))
    return prepare_tokenizer(source)


def transformers_ids(library: Library, text: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=library).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_gives_the_ids_of_transformers(tmp_path: Path, style: str, flag: str) -> None:
    library = build(style, {text: {flag: True, "normalized": flag == "normalized"} for text in [*CONTROLS, *PLAIN]})
    tokenizer = load(tmp_path, library)
    for text in TEXTS:
        assert tokenizer.encode(text, special=True) == transformers_ids(library, text), text


def draw_flags() -> st.SearchStrategy[dict[str, dict[str, bool]]]:
    flags = st.fixed_dictionaries({"normalized": st.just(False)} | {flag: st.booleans() for flag in FLAGS[:3]})
    return st.fixed_dictionaries(dict.fromkeys([*CONTROLS, *PLAIN], flags))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    style=st.sampled_from(STYLES),
    flags=draw_flags(),
    parts=st.lists(
        st.sampled_from([*CONTROLS, *PLAIN, " ", "\n", "a", ".", "\u3000", "é", "e\u0301", "7"]), max_size=12
    ),
)
def test_any_flags_give_the_ids_of_the_library(
    tmp_path: Path, style: str, flags: dict[str, dict[str, bool]], parts: list[str]
) -> None:
    library = build(style, flags)
    tokenizer = load(tmp_path, library)
    for text in ("".join(parts), " ".join(parts)):
        ids = tokenizer.encode(text, special=True)
        try:
            expected = library.encode(text, add_special_tokens=False).ids
        except BaseException as panic:  # the library's own, where one token takes what another begins with
            assert type(panic).__name__ == "PanicException"  # noqa: PT017
            continue
        assert ids == expected
        library.encode_special_tokens = True
        assert tokenizer.encode(text, special=False) == library.encode(text, add_special_tokens=False).ids
        library.encode_special_tokens = False


def test_a_message_has_no_control_token_whatever_its_flags(tmp_path: Path) -> None:
    flags = {text: dict.fromkeys(FLAGS[:2], True) for text in CONTROLS}
    library = build("bytes", flags)
    source = write(tmp_path / "m", library, library.get_vocab_size())
    (source / "chat_template.jinja").write_text("{% for m in messages %} <s> {{ m.content }} </s> {% endfor %}")
    tokenizer = prepare_tokenizer(source)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a <mask> b"}])
    assert ids == [
        library.token_to_id("<s>"),
        *tokenizer.encode("a <mask> b", special=False),
        library.token_to_id("</s>"),
    ]
    assert library.token_to_id("<mask>") not in ids
