"""What can be told of a request before it is decoded."""

from __future__ import annotations

from adapters.contract import LoadedModel
from device_profiles.units import ceil_div
from orchestrator.workers.messages import Submit
from policies.sampling.penalties import LEAST_REPETITION


def problem_with(request: Submit, target: LoadedModel) -> str:
    """Return why a request can never be served; "" where it can."""
    caps, vocabulary = target.capabilities, target.spec.vocabulary_size
    longest = len(request.prompt) + request.max_tokens
    if not request.prompt:
        return "the prompt is empty"
    if request.max_tokens < 0 or len(request.committed) >= max(1, request.max_tokens):
        return f"max_tokens {request.max_tokens} leaves nothing to generate"
    if longest > caps.max_context_tokens:
        return _tell_too_long(caps.max_context_tokens, longest, "")
    if ceil_div(longest + caps.paid_rows, caps.block_tokens) > caps.total_blocks:
        return _tell_too_long(caps.total_blocks * caps.block_tokens, longest, ", as far as the KV cache holds it")
    known = [*request.prompt, *request.committed]
    if min(known) < 0 or max(known) >= vocabulary:
        return f"a token is outside the vocabulary of {vocabulary}"
    if not request.sampling.repetition_penalty >= LEAST_REPETITION:
        return f"repetition_penalty {request.sampling.repetition_penalty} is below {LEAST_REPETITION}"
    named = [*request.stop_tokens, *(token for token, _ in request.sampling.logit_bias)]
    if named and (min(named) < 0 or max(named) >= vocabulary):
        return f"a stop or biased token is outside the vocabulary of {vocabulary}"
    return ""


def _tell_too_long(most: int, longest: int, why: str) -> str:
    """Say it in the words that clients look for."""
    return (
        f"This model's maximum context length is {most} tokens{why}. However, prompt and max_tokens make {longest} "
        "(context_length_exceeded)"
    )
