"""Tokens to text: incremental decoding, stop strings and calls, the choices of a request, and what an answer cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from adapters.token_texts import TokenTextDecoder
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.logprobs import Echo, ScoredToken
from orchestrator.daemon.api.tools import forms
from orchestrator.daemon.api.tools.calls import (
    CallArguments,
    CallBegins,
    OutputParser,
    Part,
    Text,
    Thought,
    join_pieces,
    measure_begun,
    render_parts,
)
from orchestrator.daemon.api.tools.thoughts import ThoughtSplitter
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import DEADLINE, Delta, RequestStats
from policies.sampling.logprobs import TokenScore
from policies.serving.overrides import EffectiveBound

UNFINISHED_CALL = "unfinished_call"
"""The `stop_reason` of an answer that the model itself ended within a call."""


class StopSearch:
    """Cuts text before the first stop string: the one that is complete first, the longest of those that end together.

    Text that could still become a stop string is held back, so nothing that was given out is ever retracted. Places
    count characters. A stop string ends the text only where it ends behind `quiet_end`; it may begin before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.quiet_end = 0
        self.stop: str | None = None
        self.cut_at = 0

    @property
    def held(self) -> int:
        return len(self._held)

    def push(self, text: str, place: int) -> str:
        """Return what this text, which begins at `place`, makes certain. It goes on where the last one ended. Behind a
        stop string, which is then in `stop` and began at `cut_at`, it is what stands before that."""
        text, place = self._held + text, place - len(self._held)
        matches = [(start + len(stop), start) for stop in self._stops if (start := self._find(text, stop, place)) >= 0]
        if matches:
            end, start = min(matches)
            self.stop, self._held, self.cut_at = text[start:end], "", place + start
            return text[:start]
        keep = measure_begun(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, stop: str, place: int) -> int:
        """Return where a stop string begins that ends behind the quiet text; -1 where none does."""
        return text.find(stop, max(0, self.quiet_end - place - len(stop) + 1))


def find_control_stops(stops: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the stop strings that are a control token's text, by that token. Decoded text never has them."""
    control_stops: dict[int, str] = {}
    for stop in stops:
        ids = tokenizer.encode(stop, special=True)
        if (
            len(ids) == 1
            and not tokenizer.decode(ids)
            and tokenizer.token_bytes(ids[0]).decode("utf-8", "replace") == stop
        ):
            control_stops[ids[0]] = stop
    return control_stops


class TextAssembler:
    """Pushes tokens through a decoder, finds calls in their text, and cuts what is outside of calls before the first
    stop string (see StopSearch).

    What it finds does not depend on how the text was split into tokens. The text of the first `quiet_tokens` tokens
    ends no answer, but a stop string may begin there. A stop string does not reach over a call. `parser`: what
    finds calls, where tools were offered. `decoded` and `given` count characters: of all tokens so far, and of what
    was given out or is markup.
    """

    def __init__(
        self,
        decoder: TokenTextDecoder,
        stops: Sequence[str],
        quiet_tokens: int = 0,
        parser: OutputParser | None = None,
    ) -> None:
        self._decoder = decoder
        self._search = StopSearch(stops)
        self._quiet_tokens = quiet_tokens
        self._parser = parser
        self._kind: type[Text] | type[Thought] = Text
        self.stopped = False
        self.calls = 0
        self.decoded = 0
        self.given = 0

    @property
    def stopped_by(self) -> str | None:
        return self._search.stop

    @property
    def unfinished(self) -> bool:
        return self._parser is not None and self._parser.unfinished

    def push(self, ids: Sequence[int]) -> list[Part]:
        """Return what these tokens make certain. After a stop it is always empty."""
        parts: list[Part] = []
        for token in ids:
            if not self.stopped:
                text = self._decoder.push([token])
                quiet, self._quiet_tokens = self._quiet_tokens > 0, max(0, self._quiet_tokens - 1)
                parts += self._take(text, quiet=quiet)
        return join_pieces(parts)

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return what is left at the end. `cut`: it was not the model that ended the answer."""
        if self.stopped:
            return []
        parts = self._take(self._decoder.flush(), quiet=self._quiet_tokens > 0)
        if self._parser is not None and not self.stopped:
            parts += self._cut_at_stop(self._parser.finish(cut=cut))
        if not self.stopped:
            parts += self._flush()
        return join_pieces(parts)

    def _take(self, text: str, *, quiet: bool) -> list[Part]:
        place = self.decoded
        self.decoded += len(text)
        if quiet:
            self._search.quiet_end = self.decoded
        parts = self._cut_at_stop([Text(text, place)] if self._parser is None else self._parser.push(text))
        if not self.stopped:
            pending = 0 if self._parser is None else self._parser.pending
            self.given = self.decoded - pending - self._search.held
            self.stopped = self._parser is not None and self._parser.over
        return parts

    def _cut_at_stop(self, source: Sequence[Part]) -> list[Part]:
        parts: list[Part] = []
        for part in source:
            if isinstance(part, CallBegins | CallArguments):
                parts += self._flush()
                parts.append(part)
                self.calls += isinstance(part, CallBegins)
                continue
            if type(part) is not self._kind:
                parts += self._flush()
                self._kind = type(part)
            if text := self._search.push(part.text, part.start):
                parts.append(self._kind(text))
            if self._search.stop is not None:
                self.stopped, self.given = True, self._search.cut_at
                break
        return parts

    def _flush(self) -> list[Part]:
        text = self._search.flush()
        return [self._kind(text)] if text else []


class OtherBits(NamedTuple):
    """From token `from_token` of a choice on, counted from 0, its bits are those of this group."""

    choice: int
    from_token: int
    group: str


@dataclass(slots=True)
class Answer:
    """One answer while it grows. Times are seconds of the clock; `tokens` counts up to the end or the stop;
    `speculation` holds for it (of several: for the first). `engine`: the replica that said its last token; its bits
    are those of `group`, which was `first_group` until `other_bits` says another one."""

    started_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    finish: str = ""
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    speculation: EffectiveBound | None = None
    engine: int = 0
    group: str = ""
    first_group: str = ""
    other_bits: list[OtherBits] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        return 0 if self.stats is None else self.stats.reused

    def note(self, now_s: float, tokens: int) -> None:
        if self.tokens == 0:
            self.first_s = now_s
        self.last_s = now_s
        self.tokens += tokens

    @staticmethod
    def combine_answers(answers: Sequence[Answer], *, one_prompt: bool = True) -> Answer:
        """Return what the choices of one request cost together. `one_prompt`: they have the same, or each its own."""
        answered = [answer for answer in answers if answer.tokens] or answers[:1]
        return replace(
            answers[0],
            first_s=min(answer.first_s for answer in answered),
            last_s=max(answer.last_s for answer in answered),
            tokens=sum(answer.tokens for answer in answers),
            stop_reason=None,
            stats=_sum_stats([answer.stats for answer in answers if answer.stats is not None], one_prompt=one_prompt),
            other_bits=[change for answer in answers for change in answer.other_bits],
        )


def _sum_stats(stats: Sequence[RequestStats], *, one_prompt: bool) -> RequestStats | None:
    """Add up what the choices did. Of one prompt what none of them had to compute was there before.
    They waited side by side. Who drafted for which of them is not told here."""
    if not stats:
        return None
    counts = [name for name in RequestStats.__struct_fields__ if name != "drafters"]
    summed = RequestStats(**{name: sum(getattr(each, name) for each in stats) for name in counts})
    if one_prompt:
        reused = min(each.reused for each in stats)
        summed = msgspec.structs.replace(summed, prompt_tokens=stats[0].prompt_tokens, reused=reused)
    return msgspec.structs.replace(
        summed,
        queue_ms=max(each.queue_ms for each in stats),
        prefill_ms=max(each.prefill_ms for each in stats),
        tolerance_delta=max(each.tolerance_delta for each in stats),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """What is certain of one choice: `parts`, its text, thoughts and calls in their order, calls as a chunk's
    `tool_calls` has them; the scored tokens that they complete; and with the last piece why it ended.

    `stop_reason` is vLLM's: the stop string, the token of `stop_token_ids`, or "deadline". `at`: how many of the
    choice's tokens were looked at.
    """

    index: int
    parts: tuple[str | Thought | dict[str, Any], ...] = ()
    tokens: tuple[ScoredToken, ...] = ()
    finish: str = ""
    stop_reason: str | int | None = None
    at: int = 0

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [part for part in self.parts if isinstance(part, dict)]

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))


class Choice:
    """One choice of an answer while it grows, with what it costs in `answer`. `hidden`: stop tokens, whose text is not
    shown where they end it. `named`: those of them that the request named, with what is told as the `stop_reason`.
    `ends`: those that are the model's own end. `request_id`: what the ids of its calls follow from; "" where no
    tools were offered. `prompt`: the number of the prompt that it answers. `thoughts`: tells them from text; without it
    all is text. `short_ids`: of calls."""

    def __init__(
        self,
        index: int,
        assembler: TextAssembler,
        answer: Answer,
        *,
        hidden: frozenset[int] = frozenset(),
        echo: Echo | None = None,
        named: Mapping[int, int | str] | None = None,
        ends: frozenset[int] = frozenset(),
        request_id: str = "",
        prompt: int = 0,
        thoughts: ThoughtSplitter | None = None,
        short_ids: bool = False,
    ) -> None:
        self.index = index
        self.answer = answer
        self.prompt = prompt
        self._assembler = assembler
        self._hidden = hidden
        self._echo = echo
        self._named = named or {}
        self._ends = ends
        self._request_id = request_id
        self._thoughts = thoughts
        self._short_ids = short_ids
        self._held = _HeldTokens(0 if echo is None else len(echo.text))
        self._shows_prompt = echo is not None
        self._at = 0

    def push_delta(self, delta: Delta, now_s: float) -> Iterator[Piece]:
        """Yield what a delta makes certain. The last piece has the `finish`, and no more is taken then."""
        answer, assembler = self.answer, self._assembler
        answer.speculation = delta.speculation or answer.speculation
        answer.engine = delta.engine
        if delta.group:
            if answer.group:
                answer.other_bits.append(OtherBits(self.index, answer.tokens, delta.group))
            answer.group, answer.first_group = delta.group, answer.first_group or delta.group
        if self._echo is not None and self._shows_prompt:
            self._shows_prompt = False
            yield Piece(self.index, (self._echo.text,), self._echo.attach_scores(delta.prompt_logprobs))
        shown, last = list(delta.tokens), None
        self._at += len(shown)
        if delta.finish == "stop" and shown and shown[-1] in self._hidden:
            last = shown.pop()
        parts, used = self._push_tokens(shown, delta)
        if last is not None and self._echo is not None and delta.logprobs is not None:
            # Whoever scores a text counts its tokens from both ends: the one that ends the answer is there, too.
            self._held.add(last, assembler.decoded, delta.logprobs[-1])
        answer.note(now_s, used)
        if delta.finish and not assembler.stopped:
            cut = delta.finish != "stop" or (last is not None and last not in self._ends)
            parts = join_pieces([*parts, *assembler.finish(cut=cut)])
        answer.stats = delta.stats
        answer.finish, answer.stop_reason = self._end(delta.finish, last)
        tokens = self._held.release(assembler, last=bool(delta.finish))
        parts = self._split(join_pieces(parts), last=bool(answer.finish))
        if parts or tokens or answer.finish:
            rendered = render_parts(parts, self._request_id, short_ids=self._short_ids)
            yield Piece(self.index, rendered, tokens, answer.finish, answer.stop_reason, self._at)

    def _split(self, parts: list[Part], *, last: bool) -> list[Part]:
        """Tell thoughts from text; where that is not wanted, all is text."""
        if self._thoughts is not None:
            return self._thoughts.push(parts, last=last)
        return join_pieces(Text(part.text) if isinstance(part, Thought) else part for part in parts)

    def _push_tokens(self, shown: list[int], delta: Delta) -> tuple[list[Part], int]:
        """Push tokens one by one, so that those behind a stop string are not counted; (parts, tokens used)."""
        parts: list[Part] = []
        for index, token in enumerate(shown):
            if delta.logprobs is not None:
                self._held.add(token, self._assembler.decoded, delta.logprobs[index])
            parts += self._assembler.push([token])
            if self._assembler.stopped:
                return parts, index + 1
        return parts, len(delta.tokens)

    def _end(self, finish: str, last: int | None) -> tuple[str, str | int | None]:
        """Return why the choice has ended ("": it has not), with its `stop_reason`. `last`: its stop token."""
        assembler = self._assembler
        reason = self._named.get(last) if last is not None else None
        if assembler.stopped:
            finish, reason = "stop", assembler.stopped_by
        elif finish == DEADLINE:  # OpenAI has no word for it: the answer is cut, as by max_tokens
            finish, reason = "length", DEADLINE
        elif finish == "stop" and assembler.unfinished:  # clients run the calls of an answer that is not cut
            finish, reason = "length", UNFINISHED_CALL if reason is None else reason
        return ("tool_calls" if finish == "stop" and assembler.calls else finish), reason


class _HeldTokens:
    """Scored tokens whose text is not given out yet. `before`: characters that stand before the answer."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._held: deque[ScoredToken] = deque()

    def add(self, token: int, start: int, score: TokenScore) -> None:
        self._held.append(ScoredToken(token, self._before + start, score))

    def release(self, assembler: TextAssembler, *, last: bool) -> tuple[ScoredToken, ...]:
        """Return the tokens that begin in what was given out; at an end that is no stop string, all."""
        everything = last and not assembler.stopped
        released: list[ScoredToken] = []
        while self._held and (everything or self._held[0].start < self._before + assembler.given):
            released.append(self._held.popleft())
        return tuple(released)


def choices_of(
    body: CompletionRequest | ChatRequest, submits: Sequence[Submit], tokenizer: Tokenizer, now_s: float
) -> list[Choice]:
    """Return how the text of each choice is made. They come prompt by prompt."""
    echoes: list[Echo | None] = [None] * (len(submits) // body.n)
    if isinstance(body, CompletionRequest) and body.echo:
        given = [prompt if isinstance(prompt, str) else None for prompt in body.prompts]
        echoes = [
            Echo.of(submit.prompt, text, tokenizer) for submit, text in zip(submits[:: body.n], given, strict=True)
        ]
    offers_tools = isinstance(body, ChatRequest) and bool(body.offered)
    form = forms.choose_call_form(body, tokenizer) if isinstance(body, ChatRequest) else ""
    named = {token: token for token in body.stop_token_ids} | find_control_stops(body.stops, tokenizer)
    return [
        Choice(
            index,
            TextAssembler(*_read_text(body, tokenizer, form, submit.min_tokens)),
            Answer(started_s=now_s),
            hidden=frozenset(submit.stop_tokens),
            echo=echoes[index // body.n],
            named=named,
            ends=tokenizer.eos_ids,
            request_id=submit.request_id if offers_tools else "",
            prompt=index // body.n,
            thoughts=_split_thoughts(body, submit, tokenizer),
            short_ids=form == "mistral",
        )
        for index, submit in enumerate(submits)
    ]


def _read_text(
    body: CompletionRequest | ChatRequest, tokenizer: Tokenizer, form: str, quiet_tokens: int
) -> tuple[TokenTextDecoder, list[str], int, OutputParser | None]:
    if not isinstance(body, ChatRequest):
        return tokenizer.decoder(), body.stops, quiet_tokens, None
    parser = forms.build_parser(body, tokenizer, form)
    return tokenizer.decoder(forms.choose_marks(body, tokenizer)), body.stops, quiet_tokens, parser


def _split_thoughts(
    body: CompletionRequest | ChatRequest, submit: Submit, tokenizer: Tokenizer
) -> ThoughtSplitter | None:
    if not isinstance(body, ChatRequest) or body.reasoning_format == "none":
        return None
    return forms.build_thought_splitter(body, submit.prompt, tokenizer)


def cost_of(choices: Sequence[Choice]) -> Answer:
    parts = [
        Answer.combine_answers([choice.answer for choice in group])
        for _, group in groupby(choices, key=lambda choice: choice.prompt)
    ]
    return parts[0] if len(parts) == 1 else Answer.combine_answers(parts, one_prompt=False)
