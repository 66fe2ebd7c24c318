"""What a request may ask for that not every worker does: the names of `Ready.cannot`."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.protocol.commands import Submit
from policies.sampling import Sampling

BEGUN_GRAMMAR = "a grammar that has begun"
BEGUN_PENALTIES = "penalties that have begun"
OWN_SAMPLERS = frozenset({"dry_multiplier", "typical_p", "xtc_probability"})
"""What other engines are not asked for: where they have it, they draw and count in their own ways."""


def list_needs(submit: Submit, *, has_tokens: bool) -> Iterator[tuple[str, str]]:
    """Yield the abilities that a request needs, each with the parameter that asks for it. `has_tokens`: it has some,
    which a worker that goes on has to take into account."""
    if submit.logprobs is not None:
        yield "logprobs", "logprobs"
    if submit.prompt_logprobs:
        yield "prompt_logprobs", "prompt_logprobs"
    if submit.grammar is not None:
        param = "tools" if submit.grammar.kind == "lark" else "response_format"
        yield f"grammar {submit.grammar.kind}", param
        if has_tokens:
            yield BEGUN_GRAMMAR, param
    if submit.min_tokens:
        yield "min_tokens", "min_tokens"
    if not submit.stop_tokens:
        yield "ignore_eos", "ignore_eos"
    yield from _list_sampling_needs(submit.sampling, has_tokens=has_tokens)


def _list_sampling_needs(sampling: Sampling, *, has_tokens: bool) -> Iterator[tuple[str, str]]:
    if sampling.logit_bias:
        yield "logit_bias", "logit_bias"
    for name, neutral in (("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)):
        if getattr(sampling, name) != neutral:
            yield name, name
            if has_tokens:
                yield BEGUN_PENALTIES, name
    if sampling.temperature and sampling.top_k:
        yield "top_k", "top_k"
    if sampling.temperature and sampling.min_p:
        yield "min_p", "min_p"
    if sampling.typical_p < 1.0:
        yield "typical_p", "typical_p"
    if sampling.xtc_probability:
        yield "xtc_probability", "xtc_probability"
    if sampling.dry is not None:
        yield "dry_multiplier", "dry_multiplier"
