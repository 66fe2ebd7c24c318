"""The section `tracing`: spans and metrics of OpenTelemetry, and the file of the receiver's headers."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from orchestrator.config.section import Section, is_http_url
from orchestrator.config.source_text import SourceFile
from orchestrator.errors import ConfigError

_HEADER = re.compile(r"(?P<name>[A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*(?P<value>[\x20-\x7e]+)")


class TracingSection(Section):
    """Spans and metrics of OpenTelemetry, sent by OTLP over HTTP. Needs `outrider extras install otel`."""

    endpoint: str = ""
    """The receiver's base URL; spans go to `/v1/traces` below it, metrics to `/v1/metrics`. Empty: nothing is made."""
    sample_requests: float = Field(default=1.0, ge=0, le=1)
    """The share of requests that have spans, of those whose `traceparent` does not say."""
    sample_rounds: float = Field(default=0.01, ge=0, le=1)
    """The share of rounds whose times workers tell, for spans of the requests in them."""
    metrics: bool = True
    """`false`: spans alone are sent, for a receiver that takes no metrics, such as Jaeger."""
    headers_file: str = ""
    """A file of headers that the receiver asks for, `NAME: VALUE` in each line (relative to this configuration file);
    other users must not be able to read it. Empty: none."""
    service_name: str = Field(default="outrider", min_length=1, max_length=255)
    """`service.name`, by which the receiver tells services from each other."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if not value:
            return value
        if not is_http_url(value) or (parts := urlsplit(value)).query or parts.fragment:
            raise ValueError("is no URL of a receiver, as in 'http://127.0.0.1:4318'")
        if parts.username is not None or parts.password is not None:
            raise ValueError("has a password in it: put it in a header, in tracing.headers_file")
        return value.rstrip("/")


def headers_path(tracing: TracingSection, base: Path) -> Path | None:
    """Return where the receiver's headers are, None without any; `base` is the configuration file's directory."""
    return base / Path(tracing.headers_file).expanduser() if tracing.headers_file else None


def read_headers_file(path: Path) -> dict[str, str]:
    """Return the headers of a file; empty lines and those with # count for nothing. Raises ConfigError, which never has
    a header's value."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; write 'NAME: VALUE' lines, or leave headers_file out") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no ASCII text; write 'NAME: VALUE' lines") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{path}: is open to every user of this machine; chmod o= it")
    headers: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        written = line.strip()
        if not written or written.startswith("#"):
            continue
        header = _HEADER.fullmatch(written)
        if header is None:
            raise ConfigError(f"{path}:{number}: is no header; write 'NAME: VALUE'")
        headers[header["name"]] = header["value"].strip()
    return headers


def check_tracing(tracing: TracingSection, file: SourceFile) -> None:
    """Refuse keys that would change nothing, and headers that cannot be read. Raises ConfigError."""
    named = sorted(tracing.model_fields_set - {"endpoint"})
    if named and not tracing.endpoint:
        raise file.refuse(("tracing", named[0]), "goes with tracing.endpoint; set that, or leave the key out")
    if (headers := headers_path(tracing, file.base)) is not None:
        try:
            read_headers_file(headers)
        except ConfigError as error:
            raise file.refuse(("tracing", "headers_file"), error) from error
