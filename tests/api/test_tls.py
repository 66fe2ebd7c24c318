"""The endpoint under TLS: the real client through it, a certificate that is renewed, and files that cannot be used."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from orchestrator.daemon.api.tls import Certificate
from orchestrator.errors import ConfigError
from tests.support.daemon import configuration, running

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")

WHOLE: dict[str, Any] = {"model": "toy", "prompt": "x", "stream": True, "extra_body": {"ignore_eos": True}}


def make_certificate(
    directory: Path, kind: str = "rsa:2048", name: str = "one", address: str = "127.0.0.1"
) -> tuple[Path, Path]:
    """Write a self-signed certificate of an address and its key."""
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1") if kind == "ec" else ()
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", kind, *curve, "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName=IP:{address},DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    return certificate, key


def read_common_name(port: int, trusted: Path) -> bytes:
    """Return the certificate that the server shows."""
    context = ssl.create_default_context(cafile=str(trusted))
    with (
        socket.create_connection(("127.0.0.1", port), 10) as tcp,
        context.wrap_socket(tcp, server_hostname="127.0.0.1") as tls,
    ):
        return tls.getpeercert(binary_form=True) or b""


def test_the_real_client_streams_through_tls_and_a_renewed_certificate_is_shown_after_sighup(tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    both = tmp_path / "trusted.pem"
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace("api: {", "api: {tls: {certificate: one.crt, key: one.key}, "))
    first = certificate.read_text()
    renewed, new_key = make_certificate(tmp_path, "ec", "two")
    both.write_text(first + renewed.read_text())
    monkeypatch.setenv("SSL_CERT_FILE", str(both))  # for the support that waits until it is ready
    with running(config) as daemon:
        assert daemon.url.startswith("https://")
        port = int(daemon.url.rpartition(":")[2])
        chunks = list(daemon.client.completions.create(**WHOLE, max_tokens=20))
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(httpx.HTTPError):
            httpx.get(daemon.url.replace("https", "http") + "/health")
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="x", max_retries=0) as held:
            stream = held.completions.create(**WHOLE, max_tokens=40)
            next(iter(stream))
            shutil.copy(renewed, certificate)
            daemon.process.send_signal(signal.SIGHUP)  # the key does not fit: all stays as it was
            time.sleep(0.5)
            before = read_common_name(port, both)
            assert before == ssl.PEM_cert_to_DER_cert(first)
            shutil.copy(new_key, key)
            daemon.process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + 60.0
            while read_common_name(port, both) == before and time.monotonic() < deadline:
                time.sleep(0.05)
            assert read_common_name(port, both) == ssl.PEM_cert_to_DER_cert(renewed.read_text())
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert daemon.stop() == 0
    assert "the certificate stays as it was" in daemon.log.read_text()


def test_files_that_cannot_be_used_are_named(tmp_path):
    certificate, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, name="two")
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        Certificate(certificate, other)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod o="):
        Certificate(certificate, key)
    key.chmod(0o600)
    key.write_text("nothing")
    with pytest.raises(ConfigError, match="are no certificate and its key"):
        Certificate(certificate, key)
    with pytest.raises(ConfigError, match="No such file"):
        Certificate(tmp_path / "none.crt", key)
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "RSA", "-aes256", "-pass", "pass:x", "-out", str(key)],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ConfigError, match="is encrypted"):
        Certificate(certificate, key)


def test_what_does_not_speak_tls_keeps_no_connection_for_long(tmp_path):
    make_certificate(tmp_path)
    config = configuration(tmp_path)
    keys = "tls: {certificate: one.crt, key: one.key}, header_timeout_s: 1, "
    config.write_text(config.read_text().replace("api: {", "api: {" + keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(tmp_path / "one.crt"))
        with running(config) as daemon:
            port = int(daemon.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), 30) as silent:
                begun = time.monotonic()
                assert silent.recv(100) == b""
                assert time.monotonic() - begun < 20.0
