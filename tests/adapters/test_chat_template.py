"""Chat templates are programs from outside: they may fail, and must not reach out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from adapters.chat_template import ChatTemplate, TemplateError
from adapters.tokenizer import Tokenizer
from tests.adapters.test_tokenizer import prepare_tokenizer

# In the shapes of well-known models' templates: what they call, loop over, raise and set.
SHAPES = {file.stem: file.read_text() for file in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Says <how> it\'s in a "place" — schön & ☀',
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {
                    "when": {"type": "array", "items": {"type": "string"}},
                    "city": {"type": "string", "enum": ["Genève", "北京"]},
                },
            },
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "北京"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": " Grüße 😀\n"}],
    "turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo "},
        {"role": "user", "content": "three"},
    ],
    "thought": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "because"},
        {"role": "user", "content": "three"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": "3°"}', "tool_call_id": "abcdefghi", "name": "get_weather"},
    ],
}


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ messages[7].content.upper() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ 1 + 'a' }}",
        "{{ strftime_later('%Y') }}",
        "{% set ns = namespace(_secret=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% for i in range(999999999) %}x{% endfor %}",
    ],
)
def test_broken_and_hostile_templates_are_refused(source: str) -> None:
    template = ChatTemplate(source, bos_token="", eos_token="")
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_what_templates_of_known_models_use() -> None:
    source = (
        "{{ bos_token }}{% if strftime_now is defined %}date {% endif %}"
        "{% if not tools is none %}tools{% endif %}\n"
        "    {% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}\n"
        "{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")  # noqa: S106 - no passwords
    shown = template.render([{"content": "<é>"}, {"content": "2"}], add_generation_prompt=True)
    assert shown == '<s>date {"content": "<é>"}</s>'


def render_as_transformers(source: str, chat: list[dict[str, Any]], tools: Any, prompt: bool) -> str | None:
    """What transformers makes of it; None where it raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    known = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        return str(render_jinja_template([chat], tools, None, source, add_generation_prompt=prompt, **known)[0][0])
    except Exception:
        return None


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_transformers(shape: str) -> None:
    template = ChatTemplate(SHAPES[shape], bos_token="<s>", eos_token="</s>")  # noqa: S106
    rendered = 0
    for chat in CHATS.values():
        for tools in (None, TOOLS):
            for prompt in (True, False):
                expected = render_as_transformers(SHAPES[shape], chat, tools, prompt)
                if expected is None:
                    with pytest.raises(TemplateError):
                        template.render(chat, add_generation_prompt=prompt, tools=tools)
                    continue
                assert template.render(chat, add_generation_prompt=prompt, tools=tools) == expected
                rendered += 1
    assert rendered >= 4


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "ensure_ascii=True",
        "ensure_ascii=False, separators=(',', ':')",
        "separators=(', ', '=')",
        "sort_keys=True",
        "indent=2",
        "indent='\t', sort_keys=True, ensure_ascii=True",
        "True, 1, (';', ' : '), True",
    ],
)
def test_json_is_that_of_transformers(arguments: str) -> None:
    source = (
        "{% for m in messages %}{{ m | tojson("
        + arguments
        + ") }}{% endfor %}{{ tools[0] | tojson("
        + arguments
        + ") }}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")  # noqa: S106
    odd = [{"role": "user", "content": 'a\\ufdd0 \x7f\u2028 é😀 </s> "q"', "z": [1.5, None, True], "a": {"é": 1}}]
    expected = render_as_transformers(source, odd, TOOLS, True)
    assert expected is not None
    assert template.render(odd, add_generation_prompt=True, tools=TOOLS) == expected


def test_the_date_is_todays() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d|%d %b %Y|%%') }}", bos_token="", eos_token="")
    text = template.render([], add_generation_prompt=False)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d\|\d\d \w+ 20\d\d\|%", text)
    assert text == render_as_transformers("{{ strftime_now('%Y-%m-%d|%d %b %Y|%%') }}", [], None, False)


@pytest.mark.parametrize("arguments", ["", "(ensure_ascii=True)", "(ensure_ascii=True, indent=1)"])
def test_control_tokens_in_json_stay_plain_text(tmp_path: Path, arguments: str) -> None:
    source = "{% for m in messages %}{{ m.content | tojson" + arguments + " }}{% endfor %}"
    tokenizer = Tokenizer.load(prepare_tokenizer(tmp_path, template=source))
    ids = tokenizer.encode_chat([{"role": "user", "content": "é \\ufdd1 <|im_end|>"}])
    assert 2 not in ids
    letter = "\\u00e9" if arguments else "é"
    assert tokenizer.decode(ids) == f'"{letter} \\\\ufdd1 <|im_end|>"'


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ""),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x", ""),
        ("{% if %}", "failed"),
        ("{{ messages | frobnicate }}", "frobnicate"),
        ("{{ messages[0].content.parts[0].text }}", "failed"),
        ("{% if messages[0].role == 'system' %}{{ messages[0].content.parts.text }}{% endif %}x", "failed"),
        ("{{ raise_exception('this model only completes') }}", "this model only completes"),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}x", "first"),
    ],
)
def test_a_template_that_is_of_no_use_is_found(source: str, fault: str) -> None:
    message = ChatTemplate(source, bos_token="", eos_token="").find_fault()
    assert fault in message
    assert bool(message) == bool(fault)
