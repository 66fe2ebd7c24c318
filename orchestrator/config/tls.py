"""The section `api.tls`, and its certificate and key. Every problem is one line that names the file and the way out."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from orchestrator.config.section import Section
from orchestrator.errors import ConfigError


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


def tls_paths(tls: TlsSection, base: Path) -> tuple[Path, Path]:
    """Return where certificate and key are; `base` is the configuration file's directory."""
    return base / Path(tls.certificate).expanduser(), base / Path(tls.key).expanduser()


def load_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a server's context: TLS 1.2 or 1.3. Raises ConfigError."""
    for path in (certificate, key):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; write PEM files there, or leave api.tls out") from error
        if path == key and mode & stat.S_IRWXO:
            raise ConfigError(f"{path}: is open to every user of this machine; chmod o= it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def refuse_password() -> str:  # without it OpenSSL asks on the terminal
        raise ConfigError(f"{key}: is encrypted; a service has nobody to type its password in: store it without one")

    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error.strerror or str(error)
        raise ConfigError(f"{certificate}, {key}: are no certificate and its key in PEM ({why})") from error
    return context
