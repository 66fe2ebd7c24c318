"""The requests of the load: chats and completions, greedy and drawn, short and long, with tools and schemas."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.worker.measuring.prompts import TEXTS, read_texts

Route = Literal["chat", "completions"]
LONG_EVERY = 8
_SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 24}, "ships": {"type": "integer"}},
    "required": ["place", "ships"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up_weather",
        "description": "Say how the weather is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request, without its streaming fields; its answer is the same whenever it is asked. `scored`: its answer says
    each token. Answers of other cases are compared word by word."""

    name: str
    route: Route
    body: dict[str, Any]
    scored: bool = False

    def ask_group(self, fingerprint: str) -> Case:
        """Return the case that wants one group's bits; "" is any."""
        return replace(self, body={**self.body, "system_fingerprint": fingerprint}) if fingerprint else self

    @property
    def key(self) -> str:
        """The digest under which its undisturbed answer is kept."""
        return hashlib.sha256(json.dumps([self.route, self.body], sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Lengths:
    """What fits a model: tokens of the shortest and the longest answer, and characters of a long prompt."""

    min_tokens: int
    most_tokens: int
    long_prompt_chars: int


def make_cases(seed: int, model: str, count: int, lengths: Lengths, prompts: Path | None = None) -> list[Case]:
    """Return the requests that a run repeats. Raises BenchError where the prompts cannot be read."""
    texts = [text for _, text in TEXTS] if prompts is None else [one.text for one in read_texts(prompts)]
    drawn = random.Random(f"cases {seed}")  # noqa: S311  # which request is made is no secret
    return [_make_case(number, model, drawn, texts, lengths) for number in range(count)]


def _make_case(number: int, model: str, drawn: random.Random, texts: Sequence[str], lengths: Lengths) -> Case:
    text = drawn.choice(texts)
    if number % LONG_EVERY == LONG_EVERY - 1:
        text = _lengthen(text, drawn, texts, lengths.long_prompt_chars)
    sampling: dict[str, Any] = (
        {"temperature": 0.0}
        if drawn.random() < 0.5
        else {"temperature": 0.8, "top_p": 0.95, "seed": drawn.randrange(1, 1 << 30)}
    )
    most = drawn.randint(lengths.min_tokens, lengths.most_tokens)
    common = {"model": model, "max_tokens": most, **sampling}
    scored = drawn.random() < 0.5
    # Every shape comes among any eight requests, whatever is drawn.
    shape = ("completions", "chat", "completions", "schema", "completions", "chat", "tool", "completions")[number % 8]
    messages = [{"role": "user", "content": text}]
    name = f"{number} {shape}"
    if shape == "completions":
        body = {**common, "prompt": text, "ignore_eos": True, **({"logprobs": 0} if scored else {})}
        return Case(name, "completions", body, scored)
    if shape == "schema":
        schema = {"type": "json_schema", "json_schema": {"name": "harbour", "schema": _SCHEMA}}
        return Case(name, "chat", {**common, "messages": messages, "response_format": schema})
    if shape == "tool":
        return Case(name, "chat", {**common, "messages": messages, "tools": [_TOOL], "tool_choice": "required"})
    return Case(name, "chat", {**common, "messages": messages, **({"logprobs": True} if scored else {})}, scored)


def _lengthen(text: str, drawn: random.Random, texts: Sequence[str], chars: int) -> str:
    """Return a prompt with so many characters before its question. Their order differs, so no prefix is shared."""
    parts: list[str] = []
    while sum(map(len, parts)) < chars:
        parts.append(f"Note {drawn.randrange(10_000)}: {drawn.choice(texts)}\n")
    return ("".join(parts))[:chars] + "\n" + text
