"""Every name that leaves the daemon by OpenTelemetry, and its meaning: docs/observability.md has them as tables.

`gen_ai.*`, `error.type` and `http.*` are names of OpenTelemetry's semantic conventions. There is no convention for
speculation, so those names are our own.
"""

from __future__ import annotations

PROVIDER = "outrider"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""The operation of a request, by its path."""

REQUEST = "{operation} {model}"
_PARTS = (
    ("queue", REQUEST, "a sequence waited for a place, with its replica or before"),
    ("prefill", REQUEST, "a sequence had a place, up to its first token"),
    ("decode", REQUEST, "from a sequence's first token with a replica to its last one there"),
    ("failover", REQUEST, "a replica was lost: from then to the next token; linked to the decode span before"),
    ("move", REQUEST, "another replica took the sequence over by plan: from then to the next token; linked alike"),
    ("round", REQUEST, "a sampled round that the sequence had a part in, as its worker timed it"),
    ("draft", "round", "drafters were asked, for all sequences of the round; only where this one had a draft"),
    ("verify", "round", "the target's forward, acceptance and what follows; the rest of the round"),
)
SPANS = ((REQUEST, "", "a request, from its head to the last byte of its answer; kind SERVER"), *_PARTS)
"""Each kind of span, its parent ("" where the client's span is the parent, if there is one), and its meaning."""
QUEUE, PREFILL, DECODE, FAILOVER, MOVE, ROUND, DRAFT, VERIFY = (name for name, *_ in _PARTS)

ATTRIBUTES: list[tuple[str, tuple[str, ...], str]] = []
"""Each attribute, the spans that may have it, and its meaning."""


def _name(name: str, spans: tuple[str, ...], meaning: str) -> str:
    ATTRIBUTES.append((name, spans, meaning))
    return name


_R = (REQUEST,)
OPERATION = _name("gen_ai.operation.name", _R, "`chat` or `text_completion`")
PROVIDER_NAME = _name("gen_ai.provider.name", _R, "`outrider`")
REQUEST_MODEL = _name("gen_ai.request.model", _R, "the model that serves it, by its name in cluster.yaml")
REQUEST_MAX_TOKENS = _name("gen_ai.request.max_tokens", _R, "the most tokens of its answer")
REQUEST_TEMPERATURE = _name("gen_ai.request.temperature", _R, "temperature")
REQUEST_TOP_P = _name("gen_ai.request.top_p", _R, "nucleus")
REQUEST_CHOICES = _name("gen_ai.request.choice.count", _R, "`n`, where it is more than 1")
REQUEST_STREAM = _name("gen_ai.request.stream", _R, "whether the answer is streamed")
RESPONSE_ID = _name("gen_ai.response.id", _R, "`id` of the answer, as in the log and in `outrider explain`")
RESPONSE_MODEL = _name("gen_ai.response.model", _R, "as `gen_ai.request.model`")
RESPONSE_FINISH = _name("gen_ai.response.finish_reasons", _R, "why each choice ended")
RESPONSE_FIRST_CHUNK = _name("gen_ai.response.time_to_first_chunk", _R, "seconds to the first token of any choice")
INPUT_TOKENS = _name("gen_ai.usage.input_tokens", _R, "tokens of the prompt")
OUTPUT_TOKENS = _name("gen_ai.usage.output_tokens", _R, "tokens of all choices")
_CACHED = "tokens of the prompt that were in the prefix cache"
CACHED_TOKENS = _name("gen_ai.usage.cache_read.input_tokens", _R, _CACHED)
STATUS_CODE = _name("http.response.status_code", _R, "of the answer; 499 where the client left")
_ERROR = "code of an error, or the status where it has none; the span's status is ERROR from 500 on"
ERROR_TYPE = _name("error.type", _R, _ERROR)
_RESUMED = "true where the client came back for an answer; linked to the request's first span"
RESUMED = _name("outrider.resumed", _R, _RESUMED)
_DRAFTED = "draft tokens that were verified"
DRAFTED = _name("outrider.spec.drafted_tokens", (REQUEST, DECODE, ROUND, DRAFT), _DRAFTED)
_ACCEPTED = "draft tokens that were accepted"
ACCEPTED = _name("outrider.spec.accepted_tokens", (REQUEST, DECODE, ROUND, VERIFY), _ACCEPTED)
DRAFTER = _name("outrider.spec.drafter", (DRAFT,), "whose the draft was")
_STREAM = "the sequence, as its worker knows it: `ID`, `ID-CHOICE`, with `#ATTEMPT` from the second on"
STREAM = _name("outrider.stream", (QUEUE, PREFILL, DECODE, FAILOVER, MOVE, ROUND), _STREAM)
ENGINE = _name("outrider.engine", (QUEUE, PREFILL, DECODE, ROUND), "number of the replica")
COMMITTED = _name("outrider.committed_tokens", (DECODE, ROUND), "tokens that became output")
_M = (FAILOVER, MOVE)
REASON = _name("outrider.reason", _M, "`lost`, `not_finite` or `moved`")
FROM_REPLICA = _name("outrider.from_replica", _M, "the replica that had the sequence")
TO_REPLICA = _name("outrider.to_replica", _M, "the replica that goes on with it")
_ATTEMPT = "how often the sequence was sent to a replica, this time included"
ATTEMPT = _name("outrider.attempt", _M, _ATTEMPT)
PAUSE_MS = _name("outrider.pause_ms", _M, "for how long it stood still, in ms")
ROUND_NUMBER = _name("outrider.round.number", (ROUND,), "of the worker's rounds, from 0")
ROUND_SEQUENCES = _name("outrider.round.sequences", (ROUND,), "sequences in the round")
ROUND_ROWS = _name("outrider.round.rows", (ROUND,), "rows of the whole forward")
ROUND_DEVICE_MS = _name("outrider.round.device_ms", (ROUND,), "the runtime's own forward, in ms")
ROWS = _name("outrider.rows", (ROUND,), "rows of this sequence")
PHASE = _name("outrider.phase", (ROUND,), "`prefill` or `decode`")
WORKER_PID = _name("outrider.worker.pid", (ROUND,), "the worker's process, on its host")

REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # noqa: S105 -- a metric
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"  # noqa: S105 -- a metric
METRICS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    (
        REQUEST_DURATION,
        "a request, from its head to the end of its answer",
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    (
        TIME_TO_FIRST_TOKEN,
        "to the first token of a request that came to its end",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    (
        TIME_PER_OUTPUT_TOKEN,
        "(last - first token) / (tokens - 1) of a request that came to its end, the mean of its choices",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
)
"""Each histogram in seconds, its meaning, and its buckets' upper bounds, as the conventions recommend them."""
METRIC_ATTRIBUTES = (OPERATION, PROVIDER_NAME, REQUEST_MODEL, RESPONSE_MODEL, ERROR_TYPE)
