"""What looks like a secret is taken out of a text, and hosts get other names."""

from __future__ import annotations

import json

import pytest

from orchestrator.redaction import LEFT_OUT, HostNames, redact_secrets, redact_values

SECRET = "q7" * 20


@pytest.mark.parametrize(
    "text",
    [
        f"redis://user:{SECRET}@store:6379/0",
        f"https://hooks.example/x?room=1&token={SECRET}&more=2",
        f"Authorization: Bearer {SECRET}",
        f"a key outrider-{SECRET} was seen",
        f"sk-{SECRET} hf_{SECRET} ghp_{SECRET}",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
    ],
)
def test_secrets_of_a_text(text):
    redacted = redact_secrets(text)
    assert SECRET not in redacted
    assert LEFT_OUT in redacted
    assert json.loads(redact_secrets(json.dumps({"text": text})))["text"].count(LEFT_OUT) >= 1


def test_secrets_by_their_name_and_what_only_sounds_like_one():
    data = {
        "api": {"port": 8000, "keys_file": "keys", "admin_socket": "/run/outrider-8000.sock"},
        "alerts": [{"url": f"https://u:{SECRET}@h/", "secret": SECRET, "headers": {"X-Auth": SECRET, "b": SECRET}}],
        "limits": {"max_tokens_per_minute_per_key": 7},
        "token": "",
    }
    redacted = redact_values(data)
    assert SECRET not in json.dumps(redacted)
    assert redacted["api"] == data["api"]
    assert redacted["limits"] == data["limits"]
    assert redacted["token"] == ""
    assert redacted["alerts"][0]["headers"] == {"X-Auth": LEFT_OUT, "b": LEFT_OUT}


def test_a_host_has_one_other_name_wherever_it_is_met():
    hosts = HostNames(["box", "box-1", "here", "127.0.0.1", ""])
    told = hosts.replace("box-1/CPU at http://10.1.2.3:80, box; 10.1.2.3 fe80::1 [2001:db8::1]:80 boxes 12:30:01 1.2.3")
    assert not any(name in told for name in ("box-1", "10.1.2.3", "fe80", "2001"))
    assert told.count("host-3") == 2
    assert told.endswith("boxes 12:30:01 1.2.3")
    kept = "here/CPU http://127.0.0.1:8000 [::1]:80 0.0.0.0 v2026.4.0"
    assert hosts.replace(kept) == kept
