"""The section `api.tls`."""

from __future__ import annotations

from orchestrator.config.section import Section


class TlsSection(Section):
    """Encryption of the endpoint. SIGHUP reads both files again."""

    certificate: str = ""
    """A PEM file with the certificate and its chain (relative to this configuration file). Empty: plain HTTP."""
    key: str = ""
    """A PEM file with the certificate's key, without a password; other users must not be able to read it."""

    @property
    def wanted(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.certificate)
