"""The section `alerts`: a URL that nothing could be sent to is refused with its line, and not shown."""

from __future__ import annotations

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "gopher://hidden/",
        "http:///hidden",
        "http://hidden:abc/",
        "http://hidden:70000/",
        "http://hidden:0/",
        "http://[hidden/",
    ],
)
def test_a_url_that_cannot_work_is_refused_with_its_line(tmp_path, url):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: {{source: 'simulated:toy', adapter: simulated}}\nalerts: {{webhook: '{url}'}}\n")
    with pytest.raises(ConfigError, match="needs a URL") as found:
        load_config(path)
    assert str(found.value).startswith(f"{path}:2: alerts.webhook")
    assert "hidden" not in str(found.value)
