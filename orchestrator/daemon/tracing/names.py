"""Every name that leaves the daemon by OpenTelemetry, and its meaning: docs/observability.md has them as tables.

`gen_ai.*`, `error.type` and `http.*` are names of OpenTelemetry's semantic conventions. There is no convention for
speculation, so those names are our own.
"""

from __future__ import annotations

from typing import NamedTuple

PROVIDER = "outrider"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""The operation of a request, by its path."""

QUEUE, PREFILL, DECODE, ROUND, DRAFT, VERIFY = "queue", "prefill", "decode", "round", "draft", "verify"
FAILOVER, MOVE = "failover", "move"


class SpanName(NamedTuple):
    """A kind of span: `parent` is "" where the client's span is the parent, if there is one."""

    name: str
    parent: str
    meaning: str


REQUEST = "{operation} {model}"
SPANS = (
    SpanName(REQUEST, "", "a request, from its head to the last byte of its answer; kind SERVER"),
    SpanName(QUEUE, REQUEST, "a sequence waited for a place, with its replica or before"),
    SpanName(PREFILL, REQUEST, "a sequence had a place, up to its first token"),
    SpanName(DECODE, REQUEST, "from a sequence's first token with a replica to its last one there"),
    SpanName(FAILOVER, REQUEST, "a replica was lost: from then to the next token; linked to the decode span before"),
    SpanName(
        MOVE, REQUEST, "another replica took the sequence over by plan: from then to the next token; linked alike"
    ),
    SpanName(ROUND, REQUEST, "a sampled round that the sequence had a part in, as its worker timed it"),
    SpanName(DRAFT, ROUND, "drafters were asked, for all sequences of the round; only where this one had a draft"),
    SpanName(VERIFY, ROUND, "the target's forward, acceptance and what follows; the rest of the round"),
)

OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
STATUS_CODE = "http.response.status_code"
ERROR_TYPE = "error.type"

STREAM = "outrider.stream"
ENGINE = "outrider.engine"
ATTEMPT = "outrider.attempt"
PAUSE_MS = "outrider.pause_ms"
REASON = "outrider.reason"
FROM_REPLICA = "outrider.from_replica"
TO_REPLICA = "outrider.to_replica"
RESUMED = "outrider.resumed"
ROUND_NUMBER = "outrider.round.number"
ROUND_SEQUENCES = "outrider.round.sequences"
ROUND_ROWS = "outrider.round.rows"
ROUND_DEVICE_MS = "outrider.round.device_ms"
ROWS = "outrider.rows"
PHASE = "outrider.phase"
COMMITTED = "outrider.committed_tokens"
WORKER_PID = "outrider.worker.pid"
DRAFTED = "outrider.spec.drafted_tokens"
ACCEPTED = "outrider.spec.accepted_tokens"
DRAFTER = "outrider.spec.drafter"


class AttributeName(NamedTuple):
    """An attribute, and the spans that may have it."""

    name: str
    spans: tuple[str, ...]
    meaning: str


ATTRIBUTES = (
    AttributeName(OPERATION, (REQUEST,), "`chat` or `text_completion`"),
    AttributeName(PROVIDER_NAME, (REQUEST,), "`outrider`"),
    AttributeName(REQUEST_MODEL, (REQUEST,), "the model that serves it, by its name in cluster.yaml"),
    AttributeName(REQUEST_MAX_TOKENS, (REQUEST,), "the most tokens of its answer"),
    AttributeName(REQUEST_TEMPERATURE, (REQUEST,), "temperature"),
    AttributeName(REQUEST_TOP_P, (REQUEST,), "nucleus"),
    AttributeName(REQUEST_CHOICES, (REQUEST,), "`n`, where it is more than 1"),
    AttributeName(REQUEST_STREAM, (REQUEST,), "whether the answer is streamed"),
    AttributeName(RESPONSE_ID, (REQUEST,), "`id` of the answer, as in the log and in `outrider explain`"),
    AttributeName(RESPONSE_MODEL, (REQUEST,), "as `gen_ai.request.model`"),
    AttributeName(RESPONSE_FINISH, (REQUEST,), "why each choice ended"),
    AttributeName(RESPONSE_FIRST_CHUNK, (REQUEST,), "seconds to the first token of any choice"),
    AttributeName(INPUT_TOKENS, (REQUEST,), "tokens of the prompt"),
    AttributeName(OUTPUT_TOKENS, (REQUEST,), "tokens of all choices"),
    AttributeName(CACHED_TOKENS, (REQUEST,), "tokens of the prompt that were in the prefix cache"),
    AttributeName(STATUS_CODE, (REQUEST,), "of the answer; 499 where the client left"),
    AttributeName(
        ERROR_TYPE,
        (REQUEST,),
        "code of an error, or the status where it has none; the span's status is ERROR from 500 on",
    ),
    AttributeName(
        RESUMED, (REQUEST,), "true where the client came back for an answer; linked to the request's first span"
    ),
    AttributeName(DRAFTED, (REQUEST, DECODE, ROUND, DRAFT), "draft tokens that were verified"),
    AttributeName(ACCEPTED, (REQUEST, DECODE, ROUND, VERIFY), "draft tokens that were accepted"),
    AttributeName(DRAFTER, (DRAFT,), "whose the draft was"),
    AttributeName(
        STREAM,
        (QUEUE, PREFILL, DECODE, FAILOVER, MOVE, ROUND),
        "the sequence, as its worker knows it: `ID`, `ID-CHOICE`, with `#ATTEMPT` from the second on",
    ),
    AttributeName(ENGINE, (QUEUE, PREFILL, DECODE, ROUND), "number of the replica"),
    AttributeName(COMMITTED, (DECODE, ROUND), "tokens that became output"),
    AttributeName(REASON, (FAILOVER, MOVE), "`lost`, `not_finite` or `moved`"),
    AttributeName(FROM_REPLICA, (FAILOVER, MOVE), "the replica that had the sequence"),
    AttributeName(TO_REPLICA, (FAILOVER, MOVE), "the replica that goes on with it"),
    AttributeName(ATTEMPT, (FAILOVER, MOVE), "how often the sequence was sent to a replica, this time included"),
    AttributeName(PAUSE_MS, (FAILOVER, MOVE), "for how long it stood still, in ms"),
    AttributeName(ROUND_NUMBER, (ROUND,), "of the worker's rounds, from 0"),
    AttributeName(ROUND_SEQUENCES, (ROUND,), "sequences in the round"),
    AttributeName(ROUND_ROWS, (ROUND,), "rows of the whole forward"),
    AttributeName(ROUND_DEVICE_MS, (ROUND,), "the runtime's own forward, in ms"),
    AttributeName(ROWS, (ROUND,), "rows of this sequence"),
    AttributeName(PHASE, (ROUND,), "`prefill` or `decode`"),
    AttributeName(WORKER_PID, (ROUND,), "the worker's process, on its host"),
)

REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # noqa: S105 -- a metric
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"  # noqa: S105 -- a metric


class MetricName(NamedTuple):
    """A histogram in seconds, and its buckets' upper bounds, as the conventions recommend them."""

    name: str
    meaning: str
    bounds_s: tuple[float, ...]


METRICS = (
    MetricName(
        REQUEST_DURATION,
        "a request, from its head to the end of its answer",
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    MetricName(
        TIME_TO_FIRST_TOKEN,
        "to the first token of a request that came to its end",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    MetricName(
        TIME_PER_OUTPUT_TOKEN,
        "(last - first token) / (tokens - 1) of a request that came to its end, the mean of its choices",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
)
METRIC_ATTRIBUTES = (OPERATION, PROVIDER_NAME, REQUEST_MODEL, RESPONSE_MODEL, ERROR_TYPE)


def format_tables() -> str:
    """Return the tables of docs/observability.md, as Markdown."""
    spans = [f"| `{one.name}` | {f'`{one.parent}`' if one.parent else ''} | {one.meaning} |" for one in SPANS]
    attributes = [
        f"| `{one.name}` | {', '.join(f'`{span}`' for span in one.spans)} | {one.meaning} |" for one in ATTRIBUTES
    ]
    metrics = [
        f"| `{one.name}` | {one.meaning} | {', '.join(f'{bound:g}' for bound in one.bounds_s)} |" for one in METRICS
    ]
    return "\n".join(
        [
            "| span | parent | what it is |\n|---|---|---|",
            *spans,
            "\n| attribute | spans | meaning |\n|---|---|---|",
            *attributes,
            "\n| metric (seconds) | meaning | buckets |\n|---|---|---|",
            *metrics,
        ]
    )
