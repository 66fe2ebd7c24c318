"""The section `alerts`: the daemon's own watch over what goes wrong."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from orchestrator.config.section import Section, is_http_url


def _check_url(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if text and not is_http_url(text):
        raise ValueError("needs a URL that begins with http:// or https://, names a host, and has a usable port")
    return value


class AlertsSection(Section):
    """The alerts of the runbook, evaluated by the daemon itself."""

    every_s: float = Field(default=15.0, ge=0.1, le=300)
    """How often they are evaluated."""
    time_factor: float = Field(default=1.0, ge=0.001, le=100)
    """All windows and waits of alerts are multiplied by it: below 1 they fire sooner, and on less evidence. Windows
    have to hold two evaluations at least."""
    webhook: Annotated[SecretStr, AfterValidator(_check_url)] = SecretStr("")
    """A URL that gets alerts that fire or end, as Alertmanager's webhooks do (version 4). Empty: none does. It is a
    secret, and never shown."""
