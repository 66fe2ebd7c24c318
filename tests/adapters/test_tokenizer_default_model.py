"""The default model's tokenizer agrees with an independent implementation (OpenVINO's), and is fast."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer

pytestmark = pytest.mark.model

SAMPLES = [
    "Hello, world!",
    "It's 12345 and 3.14159; we'll see, you'd DON'T I'LL",
    "def f(x):\n    return x**2  # sq\n\n\n\tif a:\n\t\tb\r\nc",
    "family 👩‍👩‍👧‍👦 flag 🏳️‍🌈 smile 😀",
    "中文 你好，世界。日本語テスト 한국어 العربية",  # noqa: RUF001 - the wide comma is meant
    "   lead",
    "trail   ",
    "a  b   c\n\n\n d \n",
    "\n",
    "  \n\t ",
    " ",
    "½ Ⅷ ٣٤ ²³ 一二 1 2  3",
    "Ünïcödé café e\u0301 \u200b\u00a0x \u3000wide\u2028line\x85",
    "$100.00 @#%^&*() <| |>",
    "\x01\x1c\x0b control",
    "x" * 50,
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|endoftext|><file_sep>a<repo_name>",
]


@pytest.fixture(scope="session")
def default(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    target = tmp_path_factory.mktemp("default")
    TokenizerRecipe().prepare(default_model_path, target, lambda *_: None)
    return Tokenizer.load(target)


@pytest.fixture(scope="session")
def openvino_tokenizer(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import openvino_genai

    directory = tmp_path_factory.mktemp("openvino")
    copy = directory / "model.gguf"
    copy.symlink_to(default_model_path)  # what is converted is written beside it
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    return openvino_genai.Tokenizer(str(directory))


@pytest.mark.parametrize("text", SAMPLES)
def test_the_default_model_agrees_with_openvino(default: Tokenizer, openvino_tokenizer: Any, text: str) -> None:
    ids = default.encode(text, special=True)
    assert ids == openvino_tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    assert default.decode(ids) == openvino_tokenizer.decode(ids)
    assert default.decode(ids, skip_special=False) == text


def test_the_default_models_chat_agrees_with_openvino(default: Tokenizer, openvino_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi there"}]
    expected = openvino_tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert default.render_chat(messages) == expected


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), cuts=st.lists(st.integers(0, 1000)))
def test_the_default_model_streams_as_it_decodes(default: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    joined = b"".join(default.token_bytes(index) for index in ids if index > 16)  # 0..16 are control tokens
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    decoder = default.decoder()
    streamed = "".join(decoder.push(ids[start:end]) for start, end in pairwise(edges)) + decoder.flush()
    assert default.decode(ids) == streamed == joined.decode("utf-8", "replace")


def test_the_default_model_is_fast_enough(default: Tokenizer) -> None:
    text = " ".join(SAMPLES[:5] * 20)
    default.encode(text, special=True)
    started = time.thread_time()
    ids = default.encode(text, special=True)
    encoded = time.thread_time()
    decoder = default.decoder()
    for index in ids:
        decoder.push([index])
    pushed_at = time.thread_time()
    assert len(ids) > 2000
    # Measured: about 4 ms and 1 us a token. The bounds only catch what is wrong by an order of magnitude.
    assert encoded - started < 0.1
    assert (pushed_at - encoded) / len(ids) < 50e-6
