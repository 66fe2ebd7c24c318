"""In which form a model writes thoughts and calls, as the text of its chat template shows it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal, get_args

OutputForm = Literal[
    "hermes",
    "llama3_json",
    "llama_pythonic",
    "json_list",
    "mistral",
    "qwen3_coder",
    "glm",
    "gemma",
    "deepseek",
    "harmony",
]
FORMS: Final[tuple[OutputForm, ...]] = get_args(OutputForm)


def write_deepseek_control(words: str) -> str:
    """Return DeepSeek's control token of this name, which is written with letters of its own for bars and gaps."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


LISTS: Final = {"<TOOLCALL>": "</TOOLCALL>", "<tool_calls>": "</tool_calls>", "<|tool_call|>": "<|/tool_call|>"}
"""What stands before and behind lists of calls in JSON: Nemotron's, Apriel's, and Granite 3's and Phi-4's."""
_MARKS: Final[tuple[tuple[OutputForm | None, tuple[str, ...]], ...]] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek", (write_deepseek_control("tool call begin"),)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm", ("<arg_key>",)),
    ("gemma", ("<|tool_call>call:",)),
    ("llama_pythonic", ("[func_name1(params_name1=",)),
    *(("llama_pythonic", (mark,)) for mark in ("<|tool_call_start|>", "<|tool_list_start|>")),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
    *(("json_list", (mark,)) for mark in ("<TOOLCALL>[", "<tool_calls>[", "<|tool_call|>")),
    (None, ("<invoke name=",)),
    ("hermes", ("<tool_call>",)),
)
"""What stands in templates of a form, and in none of those below it. None: of one that is not read."""
_TOOLS = re.compile(r"\btools\b")
_EFFORT, _SWITCH = re.compile(r"\breasoning_effort\b"), re.compile(r"\benable_thinking\b")
# DeepSeek's and Granite's name of the switch; `message.thinking` is a thought.
_OTHER_SWITCH = re.compile(r"(?<![.\w])thinking is (?:not )?defined\b")
_LEVELS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that gpt-oss was not trained on, and its own nearest ones."""


def find_output_form(template: str) -> OutputForm | None:
    """Return the form of a chat template; None where none of them is seen in it."""
    return next((form for form, marks in _MARKS if all(mark in template for mark in marks)), None)


def mentions_tools(template: str) -> bool:
    """Whether a template looks at the tools of a request."""
    return _TOOLS.search(template) is not None


def find_idle_keywords(template: str, keywords: Iterable[str]) -> list[str]:
    """Return the keywords that a template, told of them by `translate_effort`, does not look at."""
    switch = _SWITCH.search(template) or _OTHER_SWITCH.search(template)
    known = {"reasoning_effort": switch, "enable_thinking": switch}
    return [name for name in keywords if not known.get(name) and not re.search(rf"\b{re.escape(name)}\b", template)]


def translate_effort(template: str, keywords: dict[str, object], *, harmony: bool) -> dict[str, object]:
    """Return keywords of a template in its own words. An effort is a level where the template has levels, and turns
    thinking on or off where it has a switch. What the keywords say themselves is kept."""
    words = dict(keywords)
    effort = words.get("reasoning_effort")
    if harmony and isinstance(effort, str) and _EFFORT.search(template):
        words["reasoning_effort"] = _LEVELS.get(effort, effort)
    if isinstance(effort, str) and (_SWITCH.search(template) or _OTHER_SWITCH.search(template)):
        words.setdefault("enable_thinking", effort != "none")
    if "enable_thinking" in words and not _SWITCH.search(template) and _OTHER_SWITCH.search(template):
        words.setdefault("thinking", words["enable_thinking"])
    return words
