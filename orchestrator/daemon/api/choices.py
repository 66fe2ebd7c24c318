"""The choices of one request (`n`), which are decoded side by side, and what they cost together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from orchestrator.daemon.api.logprobs import Echo
from orchestrator.daemon.api.port import TokenizerPort
from orchestrator.daemon.api.stops import find_control_stops
from orchestrator.daemon.api.streaming import Answer, Choice, TextAssembler
from orchestrator.daemon.api.tools.calls import ToolCallParser
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest
from orchestrator.protocol.commands import Submit


def choices_of(
    body: CompletionRequest | ChatRequest, submits: Sequence[Submit], tokenizer: TokenizerPort, now_s: float
) -> list[Choice]:
    """Return how the text of each choice is made. They come prompt by prompt."""
    echoes: list[Echo | None] = [None] * (len(submits) // body.n)
    if isinstance(body, CompletionRequest) and body.echo:
        given = [prompt if isinstance(prompt, str) else None for prompt in body.prompts]
        echoes = [
            Echo.of(submit.prompt, text, tokenizer) for submit, text in zip(submits[:: body.n], given, strict=True)
        ]
    named = {token: token for token in body.stop_token_ids} | find_control_stops(body.stops, tokenizer)
    return [
        Choice(
            index,
            TextAssembler(tokenizer.decoder(), body.stops, submit.min_tokens, _parser(body)),
            Answer(started_s=now_s),
            hidden=frozenset(submit.stop_tokens),
            echo=echoes[index // body.n],
            named=named,
            ends=tokenizer.eos_ids,
            request_id=submit.request_id,
            prompt=index // body.n,
        )
        for index, submit in enumerate(submits)
    ]


def _parser(body: CompletionRequest | ChatRequest) -> ToolCallParser | None:
    """Return what finds calls; None where no tools were offered."""
    if not isinstance(body, ChatRequest) or not body.offered:
        return None
    names = [tool.function.name for tool in body.forced or body.offered]
    return ToolCallParser(names, forced=bool(body.forced), single=not body.parallel_tool_calls)


def cost_of(choices: Sequence[Choice]) -> Answer:
    """Return what all choices cost together."""
    parts = [
        Answer.combine_answers([choice.answer for choice in group])
        for _, group in groupby(choices, key=lambda choice: choice.prompt)
    ]
    return parts[0] if len(parts) == 1 else Answer.combine_answers(parts, one_prompt=False)
