"""The choices of one request (`n`): decoded side by side, told as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from orchestrator.api.logprobs import Echo
from orchestrator.api.port import TokenizerPort
from orchestrator.api.streaming import Answer, Choice, Piece, TextAssembler, texts
from orchestrator.api.tools.calls import ToolCallParser
from orchestrator.api.tools.stream import with_calls
from orchestrator.api.wire import ChatRequest, CompletionRequest
from orchestrator.clock import Clock
from orchestrator.workers.messages import Delta, Submit


def choices_of(
    body: CompletionRequest | ChatRequest, submits: Sequence[Submit], tokenizer: TokenizerPort, now_s: float
) -> list[Choice]:
    """Return how the text of each choice is made."""
    echo = None
    if isinstance(body, CompletionRequest) and body.echo:
        given = body.prompt[0] if isinstance(body.prompt, list) else body.prompt
        echo = Echo.of(submits[0].prompt, given if isinstance(given, str) else None, tokenizer)
    return [
        Choice(
            index,
            TextAssembler(tokenizer.decoder(), body.stops, submit.min_tokens, _behind_one_call(body)),
            frozenset(submit.stop_tokens),
            Answer(started_s=now_s),
            echo,
            frozenset(body.stop_token_ids),
        )
        for index, submit in enumerate(submits)
    ]


def pieces_of(
    body: CompletionRequest | ChatRequest,
    request_id: str,
    deltas: AsyncIterator[Delta],
    choice: Choice,
    clock: Clock,
) -> AsyncGenerator[Piece, None]:
    """Return the pieces of one choice; its tool calls are taken out of the text where tools were offered."""
    pieces = texts(deltas, choice, clock)
    if not isinstance(body, ChatRequest) or not body.offered:
        return pieces
    return with_calls(pieces, _parser(body), many=body.parallel_tool_calls, request_id=request_id)


def _parser(body: ChatRequest) -> ToolCallParser:
    return ToolCallParser([tool.function.name for tool in body.forced or body.offered], forced=bool(body.forced))


def _behind_one_call(body: CompletionRequest | ChatRequest) -> Callable[[str], bool] | None:
    """Return what ends an answer that may hold one call only. It is asked token by token, so that what the request
    is charged for does not depend on how many tokens came at once."""
    if not isinstance(body, ChatRequest) or not body.offered or body.parallel_tool_calls:
        return None
    parser = _parser(body)

    def over(text: str) -> bool:
        parser.push(text)
        return parser.ended > 0

    return over


def cost_of(choices: Sequence[Choice]) -> Answer:
    """Return what all choices cost together."""
    return Answer.combine_answers([choice.answer for choice in choices])


async def merge_pieces(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all sources as they come, until all have ended. Where one fails, or this generator is
    closed, every source is closed."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for piece in only:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[Piece, None], queue: asyncio.Queue[Piece | Exception | None]) -> None:
    try:
        async with aclosing(source):
            async for piece in source:
                queue.put_nowait(piece)
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
