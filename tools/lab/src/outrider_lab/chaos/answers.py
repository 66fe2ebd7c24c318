"""An answer as a client gathers it, from a whole body or from the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from outrider_lab.chaos.cases import Case
from outrider_lab.chaos.compare import NO_DIFFERENCE, Difference, compare_tokens, split_text


@dataclass(slots=True)
class ClientAnswer:
    """What came of one answer. `calls` are its tool calls by their index: they may be told between pieces of text.
    `tokens` are its tokens' texts where they were asked for. `groups`: the fingerprints of its chunks, each where it is
    another one, `marks` those that the usage names, and `own_chars` of the text came before the second."""

    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    finish: str = ""
    completion_tokens: int | None = None
    groups: list[str] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    own_chars: int | None = None

    @classmethod
    def of_body(cls, body: dict[str, Any]) -> ClientAnswer:
        found = cls()
        found.add(body, "message")
        return found

    def add(self, chunk: dict[str, Any], part: str = "delta") -> bool:
        """Take a chunk in; returns whether it held any output."""
        usage = chunk.get("usage")
        if usage:
            self.completion_tokens = usage["completion_tokens"]
            self.marks = usage.get("system_fingerprints") or []
        came = False
        group = chunk.get("system_fingerprint") or ""
        if group and group not in self.groups[-1:]:
            self.groups.append(group)
            self.own_chars = len(self.text) if len(self.groups) == 2 else self.own_chars
        for choice in chunk.get("choices") or ():
            message = choice.get(part) or {}
            text = choice.get("text") or message.get("content") or ""
            for number, call in enumerate(message.get("tool_calls") or ()):
                function, index = call.get("function") or {}, call.get("index", number)
                told = (function.get("name") or "") + (function.get("arguments") or "")
                self.calls[index] = self.calls.get(index, "") + told
                came = came or bool(told)
            self.text += text
            self.tokens += _list_tokens(choice.get("logprobs") or {})
            self.finish = choice.get("finish_reason") or self.finish
            came = came or bool(text)
        return came

    @property
    def is_marked(self) -> bool:
        """Whether what a stream's usage says of changes of its group is what its chunks say. Other answers name their
        first group."""
        named = [str(mark["system_fingerprint"]) for mark in self.marks]
        return not self.groups[1:] or named == self.groups[1:]

    def keep_own(self, case: Case) -> ClientAnswer:
        """Return what it has of its first group, as a broken answer. Of one that is no stream only tokens tell that."""
        if case.scored:
            return replace(self, tokens=self.tokens[: min(int(mark["from_token"]) for mark in self.marks)])
        return replace(self, text=self.text[: self.own_chars or 0], calls={})

    def units(self, case: Case) -> list[str]:
        """Return what is compared: tokens, or words where no tokens were asked for."""
        return self.tokens if case.scored else split_text("\n".join((self.text, *self.calls.values())))

    def _begins(self, whole: ClientAnswer) -> bool:
        """Return whether this broken answer is the beginning of a whole one; a stream may break within a word."""
        calls = all(whole.calls.get(index, "").startswith(call) for index, call in self.calls.items())
        return calls and whole.text.startswith(self.text)

    def compare(self, case: Case, undisturbed: ClientAnswer, *, whole: bool) -> Difference:
        """Return in what this answer differs. Numbers of tokens and the reason of the end are compared too."""
        if not whole and not case.scored and self._begins(undisturbed):
            return NO_DIFFERENCE
        difference = compare_tokens(undisturbed.units(case), self.units(case), whole=whole)
        if whole and not difference:
            counted = (self.completion_tokens or 0) - (undisturbed.completion_tokens or 0)
            known = self.completion_tokens is not None and undisturbed.completion_tokens is not None
            other = (self.finish, self.text, self.calls) != (undisturbed.finish, undisturbed.text, undisturbed.calls)
            if known and counted:
                return Difference(lost=max(0, -counted), doubled=max(0, counted))
            return Difference(wrong=int(other))
        return difference


def _list_tokens(logprobs: dict[str, Any]) -> list[str]:
    if "content" in logprobs:
        return [str(one["token"]) for one in logprobs["content"] or ()]
    return [str(token) for token in logprobs.get("tokens") or ()]
