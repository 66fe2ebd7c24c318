"""What reads an answer in its model's form: thoughts, text and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from adapters.output_form import LISTS
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.conversation import Tool
from orchestrator.daemon.api.tools.calls import OutputParser, ToolCallParser
from orchestrator.daemon.api.tools.grammar import can_write, choose_writer
from orchestrator.daemon.api.tools.harmony import CONTROLS, HarmonyParser
from orchestrator.daemon.api.tools.syntaxes import DEEPSEEK_CONTROLS, build_syntax
from orchestrator.daemon.api.tools.thoughts import ThoughtSplitter, opens_thought
from orchestrator.daemon.api.wire import ChatRequest

_THINK: Final = ("<think>", "</think>")
_SEED: Final = ("<seed:think>", "</seed:think>")
_TAGS: Final = {"mistral": ("[THINK]", "[/THINK]"), "gemma": ("<|channel>thought", "<channel|>")}
"""What opens and closes a thought, where that is not `<think>`."""
_MARKS: Final = {
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "llama3_json": ("<|python_tag|>",),
    "llama_pythonic": ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    "json_list": (*LISTS, *LISTS.values()),
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek": DEEPSEEK_CONTROLS,
}
"""What calls are written with that may be control tokens, which text leaves out."""


def choose_call_form(body: ChatRequest, tokenizer: Tokenizer) -> str:
    """Return the form in which calls come. A model whose template knows no tools was told of Hermes', and it is what
    binds an answer where no grammar says how the model's own is written."""
    form = tokenizer.output_form
    if form is None or (body.offered and not tokenizer.template_takes_tools):
        return "hermes"
    bound = body.forced or (body.offered if find_answer_schema(body) is not None else [])
    schemas = [tool.function.schema_of_arguments for tool in bound]
    return form if not bound or can_write(choose_writer(form, tokenizer), schemas) else "hermes"


def find_answer_schema(body: ChatRequest) -> dict[str, Any] | None:
    """Return the schema of an answer that is no call; None of any text."""
    return body.response_format.wanted_schema if body.response_format is not None else None


def choose_marks(body: ChatRequest, tokenizer: Tokenizer) -> frozenset[str]:
    """Return the control tokens that the parser of an answer is to see."""
    form = choose_call_form(body, tokenizer)
    if form == "harmony":
        return frozenset(CONTROLS)
    tags = [tag.removesuffix("thought") for tag in _choose_tags(tokenizer)]  # that word is none of Gemma's controls
    return frozenset((*tags, *(_MARKS.get(form, ()) if body.offered else ())))


def build_parser(body: ChatRequest, tokenizer: Tokenizer, form: str) -> OutputParser | None:
    tools = body.forced or body.offered
    names = [tool.function.name for tool in tools]
    forced, single = bool(body.forced), not body.parallel_tool_calls
    if form == "harmony":
        return HarmonyParser(names, forced=forced, single=single and bool(tools))
    if not tools:
        return None
    return ToolCallParser(names, build_syntax(form, _list_schemas(tools)), forced=forced, single=single)


def build_thought_splitter(body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> ThoughtSplitter:
    # A grammar holds from the first token on: what it writes is no thought.
    bound = bool(body.forced) or find_answer_schema(body) is not None
    tags = _choose_tags(tokenizer)
    return ThoughtSplitter(tags, opened=not bound and opens_thought(prompt, tokenizer, tags[0]))


def _choose_tags(tokenizer: Tokenizer) -> tuple[str, str]:
    return _SEED if tokenizer.template_shows(_SEED[0]) else _TAGS.get(tokenizer.output_form or "", _THINK)


def _list_schemas(tools: Sequence[Tool]) -> dict[str, dict[str, object]]:
    return {tool.function.name: tool.function.schema_of_arguments for tool in tools}
