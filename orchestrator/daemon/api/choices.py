"""The choices of one request (`n`): decoded side by side, told as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import groupby

from orchestrator.daemon.api.logprobs import Echo
from orchestrator.daemon.api.port import TokenizerPort
from orchestrator.daemon.api.stops import find_control_stops
from orchestrator.daemon.api.streaming import Answer, Choice, Piece, TextAssembler
from orchestrator.daemon.api.tools.calls import ToolCallParser
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest
from orchestrator.protocol.messages import Submit


def choices_of(
    body: CompletionRequest | ChatRequest, submits: Sequence[Submit], tokenizer: TokenizerPort, now_s: float
) -> list[Choice]:
    """Return how the text of each choice is made. They come prompt by prompt."""
    echoes: list[Echo | None] = [None] * (len(submits) // body.n)
    if isinstance(body, CompletionRequest) and body.echo:
        given = [prompt if isinstance(prompt, str) else None for prompt in body.prompts]
        echoes = [Echo.of(one.prompt, text, tokenizer) for one, text in zip(submits[:: body.n], given, strict=True)]
    named = {token: token for token in body.stop_token_ids} | find_control_stops(body.stops, tokenizer)
    offers_tools = isinstance(body, ChatRequest) and bool(body.offered)
    return [
        Choice(
            index,
            TextAssembler(tokenizer.decoder(), body.stops, submit.min_tokens, _parser(body)),
            frozenset(submit.stop_tokens),
            Answer(started_s=now_s),
            echoes[index // body.n],
            named,
            tokenizer.eos_ids,
            submit.request_id if offers_tools else None,
            index // body.n,
        )
        for index, submit in enumerate(submits)
    ]


def _parser(body: CompletionRequest | ChatRequest) -> ToolCallParser | None:
    """Return what finds calls; None where no tools were offered."""
    if not isinstance(body, ChatRequest) or not body.offered:
        return None
    names = [tool.function.name for tool in body.forced or body.offered]
    return ToolCallParser(names, forced=bool(body.forced), one=not body.parallel_tool_calls)


def cost_of(choices: Sequence[Choice]) -> Answer:
    """Return what all choices cost together."""
    parts = [
        Answer.combine_answers([choice.answer for choice in group])
        for _, group in groupby(choices, key=lambda choice: choice.prompt)
    ]
    return parts[0] if len(parts) == 1 else Answer.combine_answers(parts, one_prompt=False)


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
