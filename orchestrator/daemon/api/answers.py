"""What the routes answer, as the served OpenAPI document describes it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from policies.sampling import Rule
from policies.serving.overrides import Scope


class Answered(BaseModel):
    """A part of an answer: no field is missing, and there is no other."""

    model_config = ConfigDict(extra="forbid")


class DecodeHealth(Answered):
    """`idle`: no request is live. `stalled`: requests are, and no round was finished for `api.stalled_after_s`."""

    status: Literal["ok", "idle", "stalled"]
    phase: str
    last_token_age_s: float | None
    streams: int
    models: dict[str, str] = Field(default={})
    """Where there are several models: how the decoding of each goes."""


class Serving(Answered):
    """How much of what is to serve does. Of a model that is ready and of which not all does, `status` is "degraded"."""

    planned: int
    """Replicas that are to serve: those of the plan, or of cluster.yaml."""
    serving: int
    """Those of them that do."""
    missing: list[str] = Field(default=[])
    """Each of the others, with what became of it."""


class Health(Answered):
    """`GET /health`."""

    status: Literal["ok", "degraded"]
    phase: Literal["starting", "ready", "restarting", "unloaded", "draining"]
    detail: str
    replicas: Serving
    decode: DecodeHealth
    models: dict[str, str] = Field(default={})
    """Where there are several models: the phase of each."""


class Readiness(Answered):
    """`GET /ready`."""

    status: Literal["ready", "degraded"]
    model: str
    replicas: Serving
    models: dict[str, str] = Field(default={})
    """Where there are several models: the phase of each."""
    warnings: list[str] = Field(default=[])
    """What somebody should look after, though requests are served: what the journal cannot keep."""


class Started(Answered):
    """`GET /started`."""

    status: Literal["started"]
    model: str
    models: dict[str, str] = Field(default={})
    """Where there are several models: the phase of each."""


class Live(Answered):
    """`GET /live`."""

    status: Literal["live"]
    phase: str


class Version(Answered):
    """`GET /version`."""

    version: str


class Model(Answered):
    """One entry of `GET /v1/models`. `max_model_len`, its context in tokens, is known once the model is ready. `keep`
    and `state` are those of a model that need not stay in memory. `parent`: the model, of an entry that is one with a
    LoRA adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = 0
    keep: str = ""
    state: str = ""
    parent: str = ""


class ModelList(Answered):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(Answered):
    """`cached_tokens`: tokens of the prompt whose KV cache was there already."""

    cached_tokens: int


class CompletionTokensDetails(Answered):
    """What became of the request's `prediction`: its tokens that were verified, and became output or did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class OtherFingerprint(Answered):
    """From token `from_token` of choice `index` on, counted from 0, the bits are those of this fingerprint."""

    index: int
    from_token: int
    system_fingerprint: str


class Usage(Answered):
    """Tokens of the prompt and of all choices. Details come at the end only, not with every chunk.
    `system_fingerprints`: where an answer went on with other bits."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails(cached_tokens=0)
    completion_tokens_details: CompletionTokensDetails | None = None
    system_fingerprints: list[OtherFingerprint] = []


class EffectiveSpeculation(Answered):
    """What held for this request, in the words of `speculative_config`: a depth that is fixed
    (`num_speculative_tokens`), or a bound on what the policy chooses. `by`: whose word it was; `cut`: the operator's
    bounds changed it. Of several choices: the first's."""

    method: Literal["auto", "off"]
    num_speculative_tokens: int | None
    max_speculative_tokens: int | None
    by: Scope
    cut: bool


class SpeculativeDecoding(Answered):
    """What speculation did for this request. `acceptance` is the rule by which drafts became output; "tolerance" may
    change it. `tolerance_delta`, in nats: what drafts were judged with last; null while nothing is lost.
    `num_tolerated_tokens`: tokens of the output that are not the target's own choice."""

    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance: Rule
    tolerance_delta: float | None
    num_tolerated_tokens: int = 0
    effective: EffectiveSpeculation | None


class RequestMetrics(Answered):
    """What the request cost."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float = 0.0
    speculative_decoding: SpeculativeDecoding | None = None


class TokenLogprob(Answered):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredTokenLogprob(TokenLogprob):
    """A token with the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answered):
    """The tokens of a chat's answer with their log-probabilities."""

    content: list[ScoredTokenLogprob]
    refusal: None


class CompletionLogprobs(Answered):
    """The tokens of a completion with their log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishReason = Literal["stop", "length", "tool_calls"]


class AnsweredFunction(Answered):
    """The function that is to be called; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class Call(Answered):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(Answered):
    """The assistant's message; `tool_calls` where there are any, and then `content` may be null. `reasoning_content`:
    what the model thought before, where it did."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Call] = []


class ChatChoice(Answered):
    """One choice of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class CompletionChoice(Answered):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class _Envelope(Answered):
    """`warnings`: what of the request's schemas the text is not held to; of chunks the last of a choice has them."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class ChatCompletion(_Envelope):
    """`POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics
    warnings: list[str] = []


class Completion(_Envelope):
    """`POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics
    warnings: list[str] = []


class CallDelta(Answered):
    """A piece of call `index`: the first has id, type and name, every one more of the arguments."""

    class Piece(Answered):
        """The name comes once, the arguments bit by bit."""

        name: str = ""
        arguments: str

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: Piece


class ChatDelta(Answered):
    """What a chunk adds to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = []


class ChatChunkChoice(Answered):
    """A chunk of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class CompletionChunkChoice(Answered):
    """A chunk of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(_Envelope):
    """The data of an event. The last before [DONE] may have no choices, and the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    warnings: list[str] = []


class CompletionChunk(_Envelope):
    """The data of an event. The last before [DONE] may have no choices, and the usage."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    warnings: list[str] = []
