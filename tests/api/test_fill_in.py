"""`suffix`: a model that was taught so writes what stands between two texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import openai
import pytest

from adapters.fill_tokens import FillTokens
from adapters.token_texts import ControlTokens
from adapters.tokenizer import Tokenizer
from tests.api.support import CONTEXT_TOKENS, EOS, TOKENIZER, ScriptedControl, app_over, client_of

PRE, SUF, MID, PAD = 258, 259, 260, 261
MARKS = {"<|fim_prefix|>": PRE, "<|fim_suffix|>": SUF, "<|fim_middle|>": MID, "<|fim_pad|>": PAD}
FILLS = Tokenizer(
    dataclasses.replace(
        TOKENIZER._vocabulary,
        controls=ControlTokens({**TOKENIZER._vocabulary.controls.ids, **MARKS}),
        fill=FillTokens(PRE, SUF, MID, frozenset(MARKS.values())),
    ),
    None,
)
ASK: dict[str, Any] = {"model": "toy", "max_tokens": 6, "prompt": "a(", "suffix": ")b"}


async def complete(tokenizer: Tokenizer = FILLS, **fields: Any) -> list[tuple[list[int], list[int]]]:
    """The prompt and the stop tokens of what is decoded."""
    control = ScriptedControl()
    async with client_of(app_over(control, tokenizer=tokenizer)) as client:
        await client.completions.create(**ASK | fields)
    return [(submit.prompt, submit.stop_tokens) for submit in control.submits]


async def test_the_model_is_asked_for_the_middle():
    assert await complete() == [([PRE, *b"a(", SUF, *b")b", MID], [EOS, PRE, SUF, MID, PAD])]
    assert (await complete(prompt=""))[0][0] == [PRE, SUF, *b")b", MID]
    assert (await complete(prompt=[97, 98]))[0][0] == [PRE, 97, 98, SUF, *b")b", MID]
    assert await complete(suffix="") == [(list(b"a("), [EOS])]
    assert (await complete(extra_body={"ignore_eos": True}))[0][1] == []


async def test_marks_in_the_texts_are_text():
    prompt, _ = (await complete(prompt="<|fim_middle|>", suffix="<|end|>"))[0]
    assert prompt == [PRE, *b"<|fim_middle|>", SUF, *b"<|end|>", MID]


async def test_each_of_several_prompts_has_the_suffix():
    submits = await complete(prompt=["a", "b"], n=2)
    assert [prompt for prompt, _ in submits] == [[PRE, start, SUF, *b")b", MID] for start in b"aabb"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"echo": True}, "echo", "does not go with 'suffix'"),
        ({"suffix": 7}, "suffix", "string"),
        ({"prompt": [9999]}, "prompt", "outside the vocabulary"),
        ({"suffix": "b" * CONTEXT_TOKENS}, "prompt", f"maximum context length is {CONTEXT_TOKENS}"),
        ({"suffix": "b" * 20_000}, "suffix", f"maximum context length is {CONTEXT_TOKENS}"),
    ],
)
async def test_what_cannot_be_filled_in_is_refused(fields: dict[str, Any], param: str, says: str):
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        await complete(**fields)
    assert refused.value.param == param


async def test_a_model_without_marks_refuses_by_name():
    with pytest.raises(openai.BadRequestError, match="no tokens that mark the parts") as refused:
        await complete(TOKENIZER)
    assert (refused.value.param, refused.value.code) == ("suffix", "not_supported")
