"""What control remembers of deaths: by request, whoever sends it. Who is a suspect, who is convicted, who is refused.

The rules are in policies.serving.failover.blame. A request is known by its digest: the prompt, the grammar, and how
tokens are chosen, but for the seed. So a client that sends it again, or five clients that send the same, are one.
No effects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import msgspec

from orchestrator.daemon.control.port import QuarantinedView
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from policies.serving.failover.blame import Death, LossKind, convicts, is_suspect, probation_tokens, weigh_suspicion

# ADR 0046: suspicion counts over a request's life; who was quiet for an hour is gone. Not tuned.
_FORGET_S: Final = 3600.0
_MOST_REMEMBERED: Final = 4096  # bounds memory. Not tuned.
_DIGEST_BYTES: Final = 8
NO_RETRY: Final = {"x-should-retry": "false"}
"""The header by which OpenAI's clients are told not to send a request again."""


_ENCODER: Final = msgspec.msgpack.Encoder()

BY_OPERATOR: Final = "an operator refused it"


def digest_request(submit: Submit) -> str:
    """Return the name of what is asked for, whoever asks and whatever the seed."""
    sampling = submit.sampling if not submit.sampling.seed else replace(submit.sampling, seed=0)
    lora = (submit.lora,) if submit.lora else ()
    packed = _ENCODER.encode((submit.prompt, sampling, submit.grammar, submit.min_tokens, *lora))
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(slots=True)
class _Record:
    last_s: float
    deaths: tuple[Death, ...] = ()
    others_progress: bool = False


@dataclass(frozen=True, slots=True)
class Witness:
    """One request that ran in a worker that died. `settled`: it had SETTLED_TOKENS there. `alone`: nothing else ever
    ran there. `others_progress`: some other request had a token there."""

    submit: Submit
    digest: str
    settled: bool
    alone: bool
    others_progress: bool


@dataclass(slots=True)
class Blame:
    """`quarantine_s`: how long a convicted request is refused. `explained`: the deaths that a conviction explains.
    `numbers`: of deaths."""

    quarantine_s: float
    explained: set[int] = field(default_factory=set)
    numbers: count[int] = field(default_factory=count)
    _records: dict[str, _Record] = field(default_factory=dict)
    _unproven: set[str] = field(default_factory=set)  # digests beside which no other request has had a token
    _quarantine: dict[str, QuarantinedView] = field(default_factory=dict)

    def suspicion(self, digest: str) -> int:
        record = self._records.get(digest)
        return weigh_suspicion(record.deaths) if record is not None else 0

    @property
    def has_records(self) -> bool:
        """True where a request is remembered: without any there is nobody to look up."""
        return bool(self._records)

    def is_suspect(self, digest: str) -> bool:
        record = self._records.get(digest)
        return record is not None and is_suspect(record.deaths)

    def probation_tokens(self, digest: str) -> int:
        """Return how many tokens a suspect is to have before anything joins it."""
        record = self._records.get(digest)
        return probation_tokens(record.deaths) if record is not None else 0

    def observe_progress(self, digest: str) -> None:
        """A request had a token: the device works, for whoever is suspected beside it."""
        for other in [unproven for unproven in self._unproven if unproven != digest]:
            self._unproven.discard(other)
            if (record := self._records.get(other)) is not None:
                record.others_progress = True

    def observe_end(self, digest: str) -> None:
        """A request ended as it should: it is no cause of deaths."""
        self._records.pop(digest, None)
        self._unproven.discard(digest)

    def observe_death(
        self, number: int, kind: LossKind, cause: str, running: Sequence[Witness], now_s: float
    ) -> QuarantinedView | None:
        self._forget(now_s)
        for witness in running:
            record = self._records.setdefault(witness.digest, _Record(now_s))
            record.last_s = now_s
            record.deaths += (Death(number, kind, witness.settled, witness.alone),)
            record.others_progress |= witness.others_progress
            if not record.others_progress:
                self._unproven.add(witness.digest)
        for witness in running:
            record = self._records[witness.digest]
            if witness.alone and convicts(record.deaths, others_progress=record.others_progress):
                return self._convict(witness, record, cause, now_s)
        return None

    def refuse_quarantined(self, submit: Submit, now_s: float) -> None:
        """Raise RequestError 422 where this request is in quarantine."""
        if not self._quarantine:
            return
        quarantined = self._quarantine.get(digest_request(submit))
        if quarantined is None:
            return
        if quarantined.until_s <= now_s:
            self.release([quarantined.digest])
            return
        raise refuse(quarantined, now_s)

    def list_quarantined(self, now_s: float) -> list[QuarantinedView]:
        standing = [request for request in self._quarantine.values() if request.until_s > now_s]
        return sorted(standing, key=lambda request: -request.since_s)

    def quarantine(
        self, digest: str, request_id: str, prompt_tokens: int, now_s: float, until_s: float
    ) -> QuarantinedView:
        self.observe_end(digest)
        quarantined = QuarantinedView(digest, request_id, prompt_tokens, 0, BY_OPERATOR, since_s=now_s, until_s=until_s)
        self._quarantine[digest] = quarantined
        return quarantined

    def release(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in digests if self._quarantine.pop(digest, None) is not None]

    def _convict(self, witness: Witness, record: _Record, cause: str, now_s: float) -> QuarantinedView:
        """Quarantine a request, and clear all others of the deaths that it explains."""
        numbers = {death.number for death in record.deaths}
        self.explained |= numbers
        self.observe_end(witness.digest)
        for digest, other in list(self._records.items()):
            other.deaths = tuple(death for death in other.deaths if death.number not in numbers)
            if not other.deaths:
                self.observe_end(digest)
        submit = witness.submit
        quarantined = QuarantinedView(
            *(witness.digest, submit.request_id, len(submit.prompt), len(numbers), cause),
            since_s=now_s,
            until_s=now_s + self.quarantine_s,
        )
        self._quarantine[witness.digest] = quarantined
        return quarantined

    def _forget(self, now_s: float) -> None:
        """Drop what is too old to be told from chance, or too much to keep."""
        old = [digest for digest, record in self._records.items() if now_s - record.last_s > _FORGET_S]
        over = max(0, len(self._records) - len(old) - _MOST_REMEMBERED)
        for digest in [*old, *sorted(set(self._records) - set(old), key=lambda d: self._records[d].last_s)[:over]]:
            self.observe_end(digest)
        self.release([request.digest for request in self._quarantine.values() if request.until_s <= now_s])


def refuse(quarantined: QuarantinedView, now_s: float) -> RequestError:
    minutes = max(1, round((quarantined.until_s - now_s) / 60.0))
    why = "the operator of this server does not let this request run"
    if quarantined.deaths:
        why = f"this request ended {quarantined.deaths} worker processes, alone in the last"
    release = f"`outrider quarantine release {quarantined.digest}` lets it run again"
    text = f"{why}; it is refused for {minutes} minutes ({release})"
    return RequestError(text, status=422, code="request_quarantined", headers=NO_RETRY)
