"""Control of one target, with answers beside it: requests go in with those to prompts alike, and to the same user."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from orchestrator.clock import Clock
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.draft_store.recent import RecentOutputs, join_answers
from orchestrator.daemon.draft_store.service import DraftStoreService
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import DEADLINE, Delta
from policies.serving.overrides import EffectiveBound


class RecallingControl:
    """Implements control.port.Control. A request with speculation switched off is neither looked up nor kept."""

    def __init__(self, inner: TargetControl, clock: Clock) -> None:
        self._inner = inner
        self._recent = RecentOutputs(clock)
        self._service: DraftStoreService | None = None

    def use(self, service: DraftStoreService | None) -> DraftStoreService | None:
        """Look requests up there from now on, None: nowhere; returns the service of before, for the caller to close."""
        before, self._service = self._service, service
        self._inner.views.draft_store_view = service.view if service is not None else None
        return before

    def view(self) -> StateView:
        return self._inner.view()

    def check_room(self, coming: int = 0, wanted: int = 1) -> None:
        self._inner.check_room(coming, wanted)

    def find_speculation(self, submit: Submit) -> EffectiveBound | None:
        return self._inner.find_speculation(submit)

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        drafts = submit.depth != 0 and submit.max_tokens > 0
        helped = self._service is not None or submit.user
        return self._recall(submit, self._service) if drafts and helped else self._inner.generate(submit)

    async def _recall(self, submit: Submit, service: DraftStoreService | None) -> AsyncGenerator[Delta, None]:
        """Decode a request with what is there for it. One that would be refused does not wait for that."""
        self._inner.check_room()
        blocks, alike = list[str](), list[bytes]()
        if service is not None and (ready := self._inner.view().ready) is not None:
            blocks = service.sketch(submit, ready)
            alike = await service.recall(blocks)
        own = self._recent.find_answers(submit.owner, submit.user)
        submit = msgspec.structs.replace(submit, recalled=join_answers(own, alike))
        answer = list(submit.committed)
        async with aclosing(self._inner.generate(submit)) as deltas:
            async for delta in deltas:
                answer += delta.tokens
                if delta.finish and delta.finish != DEADLINE:
                    self._remember(submit, answer, blocks, service)
                yield delta

    def _remember(
        self, submit: Submit, answer: list[int], blocks: list[str], service: DraftStoreService | None
    ) -> None:
        if service is not None:
            service.remember(blocks, submit.prompt, answer)
        if submit.user:
            self._recent.keep(submit.owner, submit.user, answer)
            self._inner.views.recent_outputs_view = self._recent.view
