"""A daemon over a hybrid: served without drafts that are configured, which it says; a killed worker loses no token."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapters.contract import NO_REWIND
from tests.daemon.test_replaced_models import PROMPT, ask, configure, find_worker, read, reload
from tests.support.daemon import outrider_process, running
from tests.support.hybrids import write_hybrid
from tests.support.waiting import until

ON_LLAMA = ", adapter: llama_cpp"
TOKENS = 1500


@pytest.fixture
def source(tmp_path):
    return write_hybrid(tmp_path)


def test_drafts_are_left_off_and_a_killed_worker_changes_no_token(tmp_path, source):
    draft = f"{{method: model, source: {source}, adapter: llama_cpp, process: own, kv_cache: 8 MiB}}"
    config = configure(tmp_path, str(source), tmp_path / "store", model=ON_LLAMA, tail="drafts: [{method: suffix}]")
    with running(config) as daemon:
        status = daemon.status()
        assert status["ready"]["no_drafts"] == NO_REWIND
        assert (status["ready"]["drafters"], status["ready"]["exactness"]) == ([], "bit")
        shown = outrider_process("status", "--socket", str(daemon.admin))
        assert "none: it keeps a recurrent state" in " ".join(shown.stdout.split())
        expected = ask(daemon, TOKENS)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: ask(daemon, TOKENS), range(4))) == [expected] * 4
        before = find_worker(daemon)
        stream = daemon.client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=TOKENS,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text, _ = read(stream, 3)
        os.kill(before, signal.SIGKILL)
        rest, _ = read(stream)
        assert text + rest == expected
        until(lambda: find_worker(daemon) != before)
        tuned = config.read_text().replace("[{method: suffix}]", "[{method: suffix, max_match: 8}]")
        config.write_text(tuned)
        reload(daemon)
        assert daemon.status()["ready"]["drafters"] == []
        assert ask(daemon, TOKENS) == expected
        assert daemon.status()["totals"]["drafted"] == 0
        assert daemon.stop() == 0
    config.write_text(tuned.replace("{method: suffix, max_match: 8}", draft))
    refused = outrider_process("config", "check", str(config))
    assert refused.returncode != 0
    assert "it cannot draft. Choose another draft." in refused.stderr
