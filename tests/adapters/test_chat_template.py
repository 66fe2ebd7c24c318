"""Chat templates are programs from outside: they may fail, and must not reach out."""

from __future__ import annotations

import pytest

from adapters.chat_template import ChatTemplate, TemplateError


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ messages[7].content.upper() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ 1 + 'a' }}",
        "{{ strftime_now('%Y') }}",
        "{% for i in range(999999999) %}x{% endfor %}",
    ],
)
def test_broken_and_hostile_templates_are_refused(source: str) -> None:
    template = ChatTemplate(source, bos_token="", eos_token="")
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_what_templates_of_known_models_use() -> None:
    source = (
        "{{ bos_token }}{% if strftime_now is defined %}date{% endif %}"
        "{% if not tools is none %}tools{% endif %}\n"
        "    {% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}\n"
        "{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")  # noqa: S106 - no passwords
    shown = template.render([{"content": "<é>"}, {"content": "2"}], add_generation_prompt=True)
    assert shown == '<s>{"content": "<é>"}</s>'
