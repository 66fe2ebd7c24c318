"""Control of one target, with a draft store beside it: its requests go in with what was answered to prompts alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from orchestrator.control.controller import TargetControl
from orchestrator.control.port import StateView
from orchestrator.draft_store.service import DraftStoreService
from orchestrator.workers.messages import DEADLINE, Delta, Submit


class RecallingControl:
    """Implements control.port.Control. A request with speculation switched off is neither looked up nor kept."""

    def __init__(self, inner: TargetControl) -> None:
        self._inner = inner
        self._service: DraftStoreService | None = None

    def use(self, service: DraftStoreService | None) -> DraftStoreService | None:
        """Look requests up there from now on, None: nowhere; returns the service of before, for the caller to close."""
        before, self._service = self._service, service
        self._inner.draft_store_view = service.view if service is not None else None
        return before

    def view(self) -> StateView:
        """See control.port.Control."""
        return self._inner.view()

    def check_room(self, coming: int = 0) -> None:
        """See control.port.Control."""
        self._inner.check_room(coming)

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See control.port.Control."""
        service = self._service
        drafts = submit.depth != 0 and submit.max_tokens > 0
        return self._inner.generate(submit) if service is None or not drafts else self._recall(submit, service)

    async def _recall(self, submit: Submit, service: DraftStoreService) -> AsyncGenerator[Delta, None]:
        """Decode a request with what the store has for it. One that would be refused does not wait for that."""
        self._inner.check_room()
        ready, blocks = self._inner.view().ready, list[str]()
        if ready is not None:
            blocks = service.sketch(submit, ready)
            submit = msgspec.structs.replace(submit, recalled=await service.recall(blocks))
        answer = list(submit.committed)
        async with aclosing(self._inner.generate(submit)) as deltas:
            async for delta in deltas:
                answer += delta.tokens
                if delta.finish and delta.finish != DEADLINE:
                    service.remember(blocks, submit.prompt, answer)
                yield delta
