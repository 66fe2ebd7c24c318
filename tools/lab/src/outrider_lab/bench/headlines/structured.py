"""Structured output: answers under JSON schemas, plainly and with speculation in turn, one at a time.

A grammar leaves one token at many places. What it forces is drafted without a drafter, and masks cost the same in both
ways (ADR 0010).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from orchestrator.loading.drafters import build_drafter
from orchestrator.loading.models import LoadedTarget, load_tokenizer
from orchestrator.loading.options import EngineOptions
from orchestrator.recommend.record import tpot_ms
from orchestrator.recommend.ways import Way, close_drafters, decode_in_turns
from orchestrator.workers.messages import Grammar, Sampling, Submit

_MAX_TOKENS = 200
_TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "department": {"enum": ["billing", "engineering", "logistics", "accounts"]},
        "priority": {"enum": ["low", "normal", "high", "urgent"]},
        "needs_reply": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 40},
    },
    "required": ["department", "priority", "needs_reply", "summary"],
    "additionalProperties": False,
}
_PRODUCT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "category": {"enum": ["household", "outdoor", "clothing", "food", "electronics"]},
        "price": {
            "type": "object",
            "properties": {
                "amount": {"type": "integer", "minimum": 1, "maximum": 999},
                "currency": {"enum": ["EUR", "USD"]},
            },
            "required": ["amount", "currency"],
            "additionalProperties": False,
        },
        "in_stock": {"type": "boolean"},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "category", "price", "in_stock", "colours"],
    "additionalProperties": False,
}
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "born": {"type": "integer", "minimum": 1500, "maximum": 2020},
        "profession": {"enum": ["scientist", "artist", "statesman", "officer"]},
    },
    "required": ["first_name", "last_name", "born", "profession"],
    "additionalProperties": False,
}
ASKED = (
    (_TICKET, "Classify this support ticket as JSON: My invoice of March is wrong."),
    (_PRODUCT, "Describe this product as JSON: a red mountain bicycle."),
    (_PERSON, "Extract the person as JSON from: Ada Lovelace, born 1815 in London, was a mathematician."),
    (_TICKET, "Classify this support ticket as JSON: The app crashes when I open the camera."),
    (_PRODUCT, "Describe this product as JSON: a camping tent for four."),
    (_PERSON, "Extract the person as JSON from: Grace Hopper, born 1906 in New York, was an admiral."),
    (_TICKET, "Classify this support ticket as JSON: How do I change my password?"),
    (_PRODUCT, "Describe this product as JSON: a steel kettle."),
)
"""Schemas, and what is asked under them."""


def list_requests(target: LoadedTarget, count: int) -> list[Submit]:
    """Return so many requests as `response_format: json_schema` makes them, each greedy and at temperature 0.8."""
    tokenizer = load_tokenizer(target.tokenizer_dir)
    return [
        Submit(
            f"structured-{number}-{temperature:g}",
            tokenizer.encode_chat([{"role": "user", "content": text}]),
            _MAX_TOKENS,
            Sampling(temperature, seed=number),
            stop_tokens=sorted(tokenizer.eos_ids),
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        for number, (schema, text) in enumerate(ASKED[:count])
        for temperature in (0.0, 0.8)
    ]


def measure_structured(
    target: LoadedTarget, options: EngineOptions, count: int, tell: Callable[[int], object]
) -> dict[str, Any]:
    """Return tokens/s of both ways (prefill included, the grammars' as well), and whether the outputs are the same."""
    submits = list_requests(target, count)
    ways = [Way("plain", options), Way("spec", options, build_drafter(options, target))]
    try:
        decode_in_turns(target, ways, [submits[0]], lambda _: None)  # what is compiled once is not measured
        runs = decode_in_turns(target, ways, submits, tell)
    finally:
        close_drafters(ways)
    plain, spec = (list(runs[name].records.values()) for name in ("plain", "spec"))
    rates = [sum(len(one.tokens) for one in some) / sum(one.last_s for one in some) for some in (plain, spec)]
    return {
        "requests": len(submits),
        "tokens": sum(len(one.tokens) for one in plain),
        "plain_tokens_per_s": rates[0],
        "spec_tokens_per_s": rates[1],
        "speed_up": rates[1] / rates[0],
        "tpot_speed_up": tpot_ms(plain) / tpot_ms(spec),
        "identical": [one.tokens for one in plain] == [one.tokens for one in spec],
    }
