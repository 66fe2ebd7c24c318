"""What can be told of a request before it is decoded."""

from __future__ import annotations

from adapters.loaded_model import LoadedModel, LoraSlots
from device_profiles.units import ceil_div
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Refused
from policies.sampling.penalties import LEAST_REPETITION


def find_refusal(request: Submit, target: LoadedModel) -> Refused | None:
    """Return why a request can never be served; None where it can."""
    problem = _find_problem(request, target)
    if problem:
        return Refused(request.request_id, problem, "invalid")
    caps = target.capabilities
    longest = len(request.prompt) + request.max_tokens
    held = caps.total_blocks * caps.block_tokens
    fits = ceil_div(longest + caps.min_rows, caps.block_tokens) <= caps.total_blocks
    if fits and longest <= caps.max_context_tokens:
        return None
    text = f"prompt and max_tokens make {longest} tokens"
    return Refused(request.request_id, text, "too_long", most_tokens=min(caps.max_context_tokens, held))


def _find_problem(request: Submit, target: LoadedModel) -> str:
    vocabulary = target.spec.vocabulary_size
    if not request.prompt:
        return "the prompt is empty"
    if request.max_tokens < 0 or len(request.committed) >= max(1, request.max_tokens):
        return f"max_tokens {request.max_tokens} leaves nothing to generate"
    known = [*request.prompt, *request.committed]
    if min(known) < 0 or max(known) >= vocabulary:
        return f"a token is outside the vocabulary of {vocabulary}"
    if not request.sampling.repetition_penalty >= LEAST_REPETITION:
        return f"repetition_penalty {request.sampling.repetition_penalty} is below {LEAST_REPETITION}"
    named = [*request.stop_tokens, *(token for token, _ in request.sampling.logit_bias)]
    if named and (min(named) < 0 or max(named) >= vocabulary):
        return f"a stop or biased token is outside the vocabulary of {vocabulary}"
    if request.lora and not (isinstance(target, LoraSlots) and request.lora in target.loras):
        return f"this worker has no adapter {request.lora!r}"
    return ""
