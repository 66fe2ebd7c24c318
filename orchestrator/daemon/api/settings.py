"""What the API is bound by, and who may use it."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.doors.responses.store import StoreBounds
from orchestrator.daemon.api.gates import Access
from orchestrator.daemon.api.keys import Keys
from orchestrator.daemon.tracing.port import Tracing


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds of the API: of one body, of its part beside the prompt, of its grammar, and of all bodies that are read or
    translated at a time; how long that may take; and what one key may have (0: no limit). `log_words`: the log has
    requests' and answers' text, and what bugs say. `keys`: None asks for none. `access`: what else is asked of those
    who use the API. `stalled_after_s`: see served.Liveness. `headers_after_s`, `keep_alive_s`: see answer_stream.
    `vllm_metric_names`: see metrics. `connections`: those of the server, for the metrics.
    `stored_responses`: how many of `/v1/responses` are kept. `tracing`: None: no spans.
    `allow_chat_templates`: chats may bring one."""

    max_body_bytes: int
    max_parameter_bytes: int = 256 * 1024
    max_grammar_bytes: int = 64 * 1024
    max_bodies_bytes: int = 64 * 1024 * 1024
    translation_timeout_s: float = 10.0
    max_requests_per_key: int = 0
    max_tokens_per_minute_per_key: int = 0
    log_words: bool = False
    keys: Keys | None = None
    access: Access = field(default_factory=Access)
    stalled_after_s: float = 30.0
    headers_after_s: float = 1.5
    keep_alive_s: float = 5.0
    vllm_metric_names: bool = False
    connections: Connections | None = None
    stored_responses: StoreBounds = field(default_factory=StoreBounds)
    tracing: Tracing | None = None
    allow_chat_templates: bool = False
