"""Tokenizers of single bytes with the control tokens, and the chat template, of a model of each form."""

from __future__ import annotations

import dataclasses

from adapters.chat_template import ChatTemplate
from adapters.token_texts import ControlTokens
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.tools.harmony import CONTROLS
from orchestrator.daemon.api.tools.syntaxes import DEEPSEEK_CONTROLS
from tests.api.support import TOKENIZER

SHOWN = {
    "hermes": "<tool_call>",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value}',
    "llama_pythonic": "[func_name1(params_name1=params_value1)]",
    "json_list": "<TOOLCALL>[{name, arguments}]</TOOLCALL>",
    "gemma": "<|tool_call>call:name",
    "mistral": "[TOOL_CALLS]",
    "qwen3_coder": "<tool_call><function=x><parameter=y>",
    "glm": "<tool_call>{name}<arg_key>{key}</arg_key>",
    "deepseek": f"{DEEPSEEK_CONTROLS[1]}function",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
}
"""What the template of a form has in it."""
MARKS = {
    "llama3_json": ("<|python_tag|>",),
    "llama_pythonic": ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    "json_list": ("<|tool_call|>",),
    "gemma": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
    "glm": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>"),
    "deepseek": DEEPSEEK_CONTROLS,
    "harmony": CONTROLS,
}  # fmt: skip
"""What is a control token to the models that write the form."""
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}|{% endfor %}{{ tail }}{# SHOWN #}"
)
_FIRST = 258


def build_form_tokenizer(form: str, *, without: tuple[str, ...] = (), more: str = "") -> Tokenizer:
    """Return a tokenizer of this form. `without`: control tokens that it lacks; `more`: of its template."""
    vocabulary = TOKENIZER._vocabulary
    known = [mark for mark in MARKS.get(form, ()) if mark not in (*vocabulary.controls.ids, *without)]
    ids = {mark: _FIRST + number for number, mark in enumerate(known)}
    pieces = list(vocabulary.pieces)
    for mark, index in ids.items():
        pieces[index] = mark.encode()
    controls = ControlTokens({**vocabulary.controls.ids, **ids})
    template = ChatTemplate(_TEMPLATE.replace("SHOWN", SHOWN[form]) + more, bos_token="", eos_token="")
    return Tokenizer(dataclasses.replace(vocabulary, pieces=pieces, controls=controls), template)
