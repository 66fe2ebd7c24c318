"""Which replicas do what a request asks for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.daemon.control.replicas.replicas import Replica
from orchestrator.daemon.control.state import FAILED
from orchestrator.errors import RequestError
from orchestrator.protocol.abilities import list_needs
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.ready import Ready


def find_missing_ability(submit: Submit, ready: Ready | None, *, has_tokens: bool = False) -> str:
    """Return what a request asks for that a worker cannot do; "" for nothing. `has_tokens`: it has some already."""
    return _find_missing(submit, ready, has_tokens=has_tokens)[0]


def needs_ability(submit: Submit, *, has_tokens: bool, some_unable: bool) -> bool:
    """Return whether a request asks for anything that not every worker does. `some_unable`: of those that are here,
    some do not do all but LoRA adapters, of which each has its own."""
    return bool(submit.lora) or (some_unable and any(True for _ in list_needs(submit, has_tokens=has_tokens)))


def list_unable(submit: Submit, replicas: Sequence[Replica], *, has_tokens: bool, some_unable: bool) -> dict[str, str]:
    """Say of replicas why they do not take a request for what they cannot do. `some_unable`: as in `needs_ability`."""
    if not some_unable and not submit.lora:
        return {}
    return {
        replica.name: f"does not do what is asked for: {missing}"
        for replica in replicas
        if (missing := find_missing_ability(submit, replica.state.ready, has_tokens=has_tokens))
    }


def refuse_unable(submit: Submit, replicas: Sequence[Replica], *, has_tokens: bool = False) -> RequestError | None:
    wanted = (submit.group, "")
    hopes = [replica for replica in replicas if replica.state.phase != FAILED]
    hopes = [replica for replica in hopes if not submit.group or replica.group in wanted]
    lacks = [(replica.name, *_find_missing(submit, replica.state.ready, has_tokens=has_tokens)) for replica in hopes]
    if not lacks or not all(missing for _, missing, _ in lacks):
        return None
    members = "; ".join(f"{name} does not do {missing}" for name, missing, _ in lacks)
    param = lacks[0][2]
    if has_tokens:
        text = f"no replica can go on with an answer with {param!r}: {members}"
        return RequestError(text, status=503, code="cannot_go_on", retry_after_s=1)
    return RequestError(f"no replica serves a request with {param!r}: {members}", code="unsupported", param=param)


def _find_missing(submit: Submit, ready: Ready | None, *, has_tokens: bool) -> tuple[str, str]:
    if ready is None:
        return "", ""
    if submit.lora and submit.lora not in ready.model.loras:
        return f"adapter {submit.lora}", "model"
    if not ready.cannot:
        return "", ""
    needs = list_needs(submit, has_tokens=has_tokens or bool(submit.committed))
    return next(((ability, param) for ability, param in needs if ability in ready.cannot), ("", ""))
