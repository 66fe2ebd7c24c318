"""Fields of other servers' APIs, so that what asks for nothing is taken on every route alike.

The names are those of OpenAI, Anthropic, vLLM, SGLang and llama.cpp. A null is taken of any field, known or not.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_NO_WAYS_OUT: Mapping[str, str] = {}

HARMLESS = frozenset({
    # OpenAI's
    "client_metadata", "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options", "verbosity",
    # Anthropic's
    "billing_policy", "cache_control", "inference_geo", "user_profile_id", "workspace_id",
    # vLLM's and SGLang's: where a request is scheduled, and by what a grammar is compiled
    "guided_decoding_backend", "request_id", "rid",
    # llama.cpp's: slots, figures, and what says how strong a sampler is whose own switch is among IDLE
    "cache_prompt", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "id_slot", "mirostat_eta", "mirostat_tau", "timings_per_token", "xtc_threshold",
})  # fmt: skip
"""They do not change the tokens: accepted in any value, and not used."""

IDLE: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "background": (False,), "background_options": ({},), "best_of": (1,), "function_call": ("none", "auto"),
    "modalities": (["text"],), "suffix": ("",), "tool_choice": ("none", "auto"), "top_logprobs": (0,),
    "truncation": ("auto", "disabled"),
    **dict.fromkeys(("access_programs", "context_management", "functions", "tools"), ([],)),
    **dict.fromkeys(("audio", "conversation", "image", "moderation", "reasoning_effort", "web_search_options"), ()),
    # Anthropic's
    "fallback_credit_token": ("",), "fallbacks": ([],), "mcp_servers": ([],),
    **dict.fromkeys(("compaction", "container", "prefill"), ()),
    # vLLM's and SGLang's
    "length_penalty": (1,), "priority": (0,), "stop_regex": ("", []), "truncate_prompt_tokens": (-1,),
    **dict.fromkeys((
        "add_generation_prompt", "include_reasoning", "separate_reasoning", "skip_special_tokens",
        "spaces_between_special_tokens", "stream_reasoning",
    ), (True,)),
    **dict.fromkeys(("add_special_tokens", "allowed_token_ids", "prompt_embeds", "prompt_logprobs"), ()),
    **dict.fromkeys(("bad_words", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("cache_salt", "chat_template", "custom_logit_processor", "ebnf", "lora_path"), ("",)),
    **dict.fromkeys((
        "chat_template_kwargs", "kv_transfer_params", "mm_processor_kwargs", "session_params", "vllm_xargs",
    ), ({},)),
    **dict.fromkeys((
        "continue_final_message", "early_stopping", "include_stop_str_in_output", "no_stop_trim",
        "return_hidden_states", "return_token_ids", "return_tokens_as_token_ids", "use_beam_search",
    ), (False,)),
    # llama.cpp's
    "lora": ([],), "parse_tool_calls": (True,), "reasoning_format": ("none", "auto"), "repeat_penalty": (1,),
    "response_fields": ([],), "top_n_sigma": (-1,), "typical_p": (1,),
    **dict.fromkeys((
        "dry_multiplier", "dynatemp_range", "min_keep", "mirostat", "n_keep", "n_probs", "xtc_probability",
    ), (0,)),
    **dict.fromkeys(("post_sampling_probs", "return_progress", "return_tokens", "thinking_forced_open"), (False,)),
}  # fmt: skip
"""They would change the answer and are not served: the values that ask for nothing are accepted, others refused."""

WAYS_OUT = {
    "best_of": "ask for 'n' choices with 'logprobs' and choose among them",
    "functions": "send 'tools'",
    "function_call": "send 'tool_choice'",
    "repeat_penalty": "send 'repetition_penalty'",
    "chat_template": "the model's own is used, and 'chat_template_kwargs' reach it",
    "allowed_token_ids": "send 'logit_bias' or a 'response_format'",
}
"""What to send instead of some of them."""


def asks_for_nothing(value: Any, idle_values: tuple[Any, ...]) -> bool:
    """Return whether a value is null, or one of those that ask for nothing."""
    # To Python 0 is False, but `logprobs: 0` asks for the log-probability of each chosen token.
    same_kind = (idle for idle in idle_values if isinstance(value, bool) == isinstance(idle, bool))
    return value is None or any(value == idle for idle in same_kind)


def keep_known(
    data: Any,
    fields: Collection[str],
    *,
    harmless: Collection[str] = HARMLESS,
    idle: Mapping[str, tuple[Any, ...]] = IDLE,
    ways_out: Mapping[str, str] = _NO_WAYS_OUT,
) -> Any:
    """Return a body without nulls and what asks for nothing: only its route's `fields` are left. Raises
    PydanticCustomError by name for any other field. `ways_out`: how `response_format` says what other servers' do."""
    if not isinstance(data, dict):
        return data
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if value is None:
            continue
        if key in fields:
            kept[key] = value
        elif key in idle:
            if not asks_for_nothing(value, idle[key]):
                raise PydanticCustomError("not_supported", "{text}", {"field": key, "text": describe_refusal(key)})
        elif key not in harmless:
            text = _describe_unknown(key, fields, ways_out)
            raise PydanticCustomError("unknown_field", "{text}", {"field": key, "text": text})
    return kept


def _describe_unknown(key: str, fields: Collection[str], ways_out: Mapping[str, str]) -> str:
    if key in ways_out:
        return f"unknown field {key!r}; send 'response_format' instead: {ways_out[key]}"
    near = difflib.get_close_matches(key, list(fields), n=1)
    return f"unknown field {key!r}" + (f"; did you mean '{near[0]}'?" if near else "")


def describe_refusal(key: str) -> str:
    """Return why a field of `IDLE` is refused, and the way out."""
    way_out = WAYS_OUT.get(key)
    return f"'{key}' is not supported" + (f": {way_out}" if way_out else "; leave it out")
