"""What the API is bound by, and who may use it."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.config.model import Api, Limits
from orchestrator.daemon.api.audit import AuditLog
from orchestrator.daemon.api.connections import Connections
from orchestrator.daemon.api.keys import Keys
from orchestrator.daemon.tracing.port import Tracing


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The sections `limits` and `api` of cluster.yaml. `log_words`: the log has requests' and answers' text, and what
    bugs say. `keys`: None asks for none. `connections`: those of the server, for the metrics. `tracing`: None: no
    spans."""

    limits: Limits = field(default_factory=Limits)
    api: Api = field(default_factory=Api)
    log_words: bool = False
    keys: Keys | None = None
    audit: AuditLog = field(default_factory=AuditLog)
    connections: Connections | None = None
    tracing: Tracing | None = None
