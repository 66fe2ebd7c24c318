"""Request bodies. A field that would change the output and is not supported is refused, never ignored.

Fields of other servers' APIs that ask for nothing are taken on every route alike. Their names are those of OpenAI,
Anthropic, vLLM, SGLang and llama.cpp. A null is taken of any field, known or not.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api import conversation
from policies.sampling import Acceptance
from policies.sampling.penalties import LEAST_REPETITION

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
    "cache_prompt", "dynatemp_exponent", "id_slot", "mirostat_eta", "mirostat_tau", "timings_per_token",
})  # fmt: skip
"""They do not change the tokens: accepted in any value, and not used, which `warnings` says."""
_SAYS_NOTHING: tuple[Any, ...] = (False, "", "auto", [], {})
"""Values of them that no warning needs to name: as the field's absence."""
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
    "response_fields": ([],), "top_n_sigma": (-1,),
    **dict.fromkeys(("dynatemp_range", "min_keep", "mirostat", "n_keep", "n_probs"), (0,)),
    **dict.fromkeys(("post_sampling_probs", "return_progress", "return_tokens", "thinking_forced_open"), (False,)),
}  # fmt: skip
"""They would change the answer and are not served: the values that ask for nothing are accepted, others refused."""
WAYS_OUT = {
    "best_of": "ask for 'n' choices with 'logprobs' and choose among them",
    "functions": "send 'tools'",
    "function_call": "send 'tool_choice'",
    "repeat_penalty": "send 'repetition_penalty'",
    "chat_template": "the model's own is used, and 'chat_template_kwargs' reach it; the operator can allow it on "
    "/v1/chat/completions by api.allow_chat_templates",
    "allowed_token_ids": "send 'logit_bias' or a 'response_format'",
}
"""What to send instead of some of them."""
MAX_STOPS = 16  # four times OpenAI's. Bounds work for each token.
MAX_BREAKERS = 16  # as many as stop strings
# Tokens that they stand in, which go with the request. Not tuned: the four usual ones have some thousands.
MAX_BREAKER_TOKENS = 65_536
BreakerText = Annotated[str, Field(min_length=1, max_length=40)]
"""llama.cpp's longest."""
MAX_CHOICES = 16  # of `n`: each takes a place. Not tuned.
MAX_SEQUENCES = 128
"""Of one request: its prompts, times `n`. ADR 0102."""
MAX_BIASES = 1024  # bounds work for each token. Not tuned.
TOP_LOGPROBS = 20  # OpenAI's
# Longer than an email address or a digest. Bounds memory (ADR 0035).
MAX_USER_TAG = 512
_BOUND = "speculative_config.max_speculative_tokens"
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Prompt = str | list[int]
# vLLM's and other servers' ways to ask for what `response_format` does here.
_BY_FORMAT = {
    **dict.fromkeys(
        ("guided_json", "guided_decoding", "structured_outputs", "json_schema", "format"),
        '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}',
    ),
    "guided_choice": 'a JSON schema with an "enum" of the choices',
    **dict.fromkeys(("guided_regex", "regex"), 'a JSON schema of a string with the "pattern"'),
    **dict.fromkeys(("guided_grammar", "grammar"), "a JSON schema; other grammars are not taken"),
}


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
        elif key in harmless:  # of this route, though elsewhere it may be in `idle`
            continue
        elif key in idle:
            if not asks_for_nothing(value, idle[key]):
                raise PydanticCustomError("not_supported", "{text}", {"field": key, "text": describe_refusal(key)})
        else:
            text = _describe_unknown(key, fields, ways_out)
            raise PydanticCustomError("unknown_field", "{text}", {"field": key, "text": text})
    return kept


def list_unused(data: Any, fields: Collection[str], harmless: Collection[str]) -> tuple[str, ...]:
    """Return the fields of a body that are taken and not used, where they ask for something."""
    if not isinstance(data, dict):
        return ()
    given = {key: value for key, value in data.items() if key in harmless and key not in fields}
    return tuple(
        key for key, value in given.items() if value is not None and not asks_for_nothing(value, _SAYS_NOTHING)
    )


def _describe_unknown(key: str, fields: Collection[str], ways_out: Mapping[str, str]) -> str:
    if key in ways_out:
        return f"unknown field {key!r}; send 'response_format' instead: {ways_out[key]}"
    near = difflib.get_close_matches(key, list(fields), n=1)
    return f"unknown field {key!r}" + (f"; did you mean '{near[0]}'?" if near else "")


def describe_refusal(key: str) -> str:
    """Return why a field of `IDLE` is refused, and the way out."""
    way_out = WAYS_OUT.get(key)
    return f"'{key}' is not supported" + (f": {way_out}" if way_out else "; leave it out")


class StreamOptions(conversation.Body):
    """`include_usage`: a last chunk carries the usage; with `continuous_usage_stats` every chunk does, of its choice so
    far. `include_obfuscation` is accepted and not used."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SpeculativeConfig(conversation.Body):
    """Speculation of one request. `method`: "off" is plain decoding, "auto" leaves the depth to the policy.
    `num_speculative_tokens` fixes the depth, and `max_speculative_tokens` bounds the policy's choice. `acceptance` is
    the rule by which drafts become output."""

    method: Literal["auto", "off"] = "auto"
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=64)
    max_speculative_tokens: int | None = Field(default=None, ge=0, le=64)
    acceptance: Acceptance | None = None

    @model_validator(mode="after")
    def _one_override(self) -> SpeculativeConfig:
        if self.num_speculative_tokens is not None and self.max_speculative_tokens is not None:
            text = "'{field}' bounds a depth that 'num_speculative_tokens' fixes: send one of them"
            raise PydanticCustomError("invalid_combination", text, {"field": _BOUND})
        return self


class JsonSchema(conversation.Body):
    """A named schema. `strict` is accepted in either value: the output always keeps to the schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(conversation.Body):
    """What the text of an answer must be. `strict` belongs to the schema, and some clients put it here."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    strict: bool | None = None

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the text must keep to; None for any text."""
        if self.type == "text":
            return None
        named = self.json_schema.schema_ if self.json_schema is not None else None
        return {"type": "object"} if named is None else named

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        field = "response_format.json_schema"
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing_parameter", "'{field}' is missing", {"field": field})
        if self.type != "json_schema" and self.json_schema is not None:
            text = "'{field}' goes with type 'json_schema'"
            raise PydanticCustomError("invalid_combination", text, {"field": field})
        return self


class Sampled(conversation.Body):
    """What every route that generates shares. `harmless` fields are accepted and not used; of `not_supported` ones only
    the values that ask for nothing are. `ways_out`: what to send instead of fields of other servers."""

    harmless: ClassVar[frozenset[str]] = HARMLESS
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = IDLE
    ways_out: ClassVar[dict[str, str]] = {}

    model: str
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default={}, max_length=MAX_BIASES)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=LEAST_REPETITION, le=10.0)
    typical_p: float = Field(default=1.0, gt=0.0, le=1.0)
    xtc_probability: float = Field(default=0.0, ge=0.0, le=1.0)
    xtc_threshold: float = Field(default=0.1, ge=0.0, le=1.0)
    dry_multiplier: float = Field(default=0.0, ge=0.0, le=100.0)
    dry_base: float = Field(default=1.75, ge=1.0, le=100.0)
    dry_allowed_length: int = Field(default=2, ge=1, le=1_000_000)
    dry_penalty_last_n: int = Field(default=-1, ge=-1)
    dry_sequence_breakers: list[BreakerText] = Field(default=["\n", ":", '"', "*"], max_length=MAX_BREAKERS)
    seed: int | None = None
    stop_token_ids: list[int] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    timeout_s: float | None = Field(default=None, gt=0.0, le=86_400.0)
    min_tokens: int = Field(default=0, ge=0)
    stream: bool = False
    speculative_config: SpeculativeConfig | None = None

    @property
    def excludes_top(self) -> bool:
        """Whether XTC is on: no two tokens have more than half."""
        return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5

    @model_validator(mode="after")
    def _filters_need_a_temperature(self) -> Sampled:
        """At temperature 0 the other filters keep the token that is chosen; these may not."""
        wrong = {"typical_p": self.typical_p < 1.0, "xtc_probability": self.excludes_top}
        field = next((name for name, is_on in wrong.items() if is_on and self.temperature == 0.0), None)
        if field is not None:
            raise PydanticCustomError("invalid_combination", "'{field}' needs a temperature above 0", {"field": field})
        return self

    _unused: tuple[str, ...] = PrivateAttr(default=())

    @property
    def unused(self) -> tuple[str, ...]:
        """The fields that were taken and are not used: no answer of any model depends on them."""
        return self._unused

    @model_validator(mode="wrap")
    @classmethod
    def _check_known_fields(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop harmless fields, fields left at "nothing", and nulls; refuse the rest by name."""
        lists = (cls.harmless, cls.not_supported, cls.ways_out)
        body = build(keep_known(data, cls.model_fields, harmless=lists[0], idle=lists[1], ways_out=lists[2]))
        body._unused = list_unused(data, cls.model_fields, cls.harmless)
        return body


class Generation(Sampled):
    """What OpenAI's older routes share."""

    ways_out: ClassVar[dict[str, str]] = _BY_FORMAT

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: StopText | list[StopText] | None = None
    user: str = Field(default="", max_length=MAX_USER_TAG)
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    draft_stores: list[str] | None = Field(default=None, max_length=16)
    system_fingerprint: str | None = Field(default=None, max_length=64)

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def names_acceptance(self) -> bool:
        return self.speculative_config is not None and self.speculative_config.acceptance is not None

    @model_validator(mode="after")
    def _few_stops(self) -> Generation:
        if len(self.stops) > MAX_STOPS:
            raise PydanticCustomError(
                "stop", "'stop' takes at most {most} strings", {"field": "stop", "most": MAX_STOPS}
            )
        return self


def _check_prompt(prompt: Any) -> Any:
    """Return a prompt, or prompts, of a form that is taken. Raises PydanticCustomError."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise _no_prompt("prompt", "this is no prompt")
    if not prompt:
        raise _no_prompt("prompt", "an empty list asks for nothing")
    other = next((number for number, part in enumerate(prompt) if type(part) is not type(prompt[0])), None)
    if other is not None:
        raise _no_prompt(f"prompt.{other}", "it is of another kind than what stands before it")
    if isinstance(prompt[0], str):
        return prompt
    several = isinstance(prompt[0], list)
    for number, tokens in enumerate(prompt if several else [prompt]):
        wrong = next((place for place, token in enumerate(tokens) if type(token) is not int), None)
        if wrong is not None:
            raise _no_prompt(f"prompt.{number}.{wrong}" if several else f"prompt.{wrong}", "it is no token id")
    return prompt


def _no_prompt(field: str, why: str) -> PydanticCustomError:
    text = f"{why}: send a text, token ids, or a list of texts or of lists of token ids"
    return PydanticCustomError("invalid_value", "{text}", {"field": field, "text": text})


class CompletionRequest(Generation):
    """`POST /v1/completions`. Several prompts are several requests with the same fields: each has `n` choices."""

    prompt: Annotated[str | list[int] | list[str] | list[list[int]], BeforeValidator(_check_prompt)]
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS)
    echo: bool = False
    suffix: str = ""
    """The answer is what stands between the prompt and this."""

    @property
    def prompts(self) -> list[Prompt]:
        """What is to be completed: texts, or the ids of tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast(list[Prompt], self.prompt))

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are scored beside each token; None without any scores."""
        return self.logprobs

    @model_validator(mode="after")
    def _few_sequences(self) -> CompletionRequest:
        if len(self.prompts) * self.n > MAX_SEQUENCES:
            text = "'{field}' has {prompts} prompts, with 'n' {n} choices of each: one request takes {most} at most"
            counts = {"field": "prompt", "prompts": len(self.prompts), "n": self.n, "most": MAX_SEQUENCES}
            raise PydanticCustomError("invalid_combination", text, counts)
        return self

    @model_validator(mode="after")
    def _no_echo_of_parts(self) -> CompletionRequest:
        if self.suffix and self.echo:
            text = "'{field}' does not go with 'suffix': the answer stands between the two"
            raise PydanticCustomError("invalid_combination", text, {"field": "echo"})
        return self

    @model_validator(mode="after")
    def _something_to_answer(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            text = "'{field}' 0 asks for nothing without 'echo'"
            raise PydanticCustomError("invalid_combination", text, {"field": "max_tokens"})
        return self


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: list[conversation.Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[conversation.OfferedTool] = Field(default=[], max_length=conversation.MAX_TOOLS)
    tool_choice: conversation.ToolChoice = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS)
    prediction: conversation.Prediction | None = None
    reasoning_effort: conversation.Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: conversation.TemplateKeywords = Field(default={})
    chat_template: str = ""
    """Stands for the model's own, where the operator allows that."""
    reasoning_format: Literal["auto", "none", "deepseek"] = "auto"
    """`none`: thoughts stay in the content, as the model writes them."""

    @property
    def template_keywords(self) -> dict[str, Any]:
        """What the chat template is told beside messages and tools."""
        return conversation.collect_keywords(self.reasoning_effort, self.chat_template_kwargs)

    @property
    def offered(self) -> list[conversation.Tool]:
        """The tools that the model is told of; none where `tool_choice` says so."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced(self) -> list[conversation.Tool]:
        """The tools of which one must be called; [] where the answer may be text."""
        if isinstance(self.tool_choice, conversation.NamedChoice):
            named = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == named]
        return self.tools if self.tool_choice == "required" else []

    @model_validator(mode="after")
    def _a_choice_among_the_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two of the tools have one name", {"field": "tools"})
        if self.tool_choice == "required" and not names:
            raise PydanticCustomError("tools", "'tool_choice' needs 'tools' to choose from", {"field": "tool_choice"})
        if isinstance(self.tool_choice, conversation.NamedChoice) and self.tool_choice.function.name not in names:
            text = "'tool_choice' names a function that is not among the tools"
            raise PydanticCustomError("tools", text, {"field": "tool_choice"})
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are scored beside each token; None without any scores."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _top_of_something(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            text = "'{field}' needs 'logprobs': true"
            raise PydanticCustomError("invalid_combination", text, {"field": "top_logprobs"})
        return self
