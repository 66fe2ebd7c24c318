"""A batch waits while the disk is full, and goes on when there is room."""

from __future__ import annotations

from contextlib import ExitStack

import openai
import pytest

from tests.batches.support import slow_down, slow_script, wait_until
from tests.batches.test_batch_routes import completions, count_completed, create, lines_in, upload, wait_for_end
from tests.support.daemon import configuration, running
from tests.support.small_disk import keep_full, small_disk


def test_a_full_disk_makes_a_batch_wait_also_over_a_killed_daemon(tmp_path):
    config = configuration(tmp_path, script=slow_script(tmp_path), extra="drafts: []\njournal: {reserve: 1 MiB}")
    with small_disk(tmp_path / "state", 8) as state, ExitStack() as full:
        with slow_down(tmp_path), running(config) as daemon:
            file_id = upload(daemon.client, completions(24))
            batch_id = create(daemon.client, file_id)
            wait_until(lambda: count_completed(daemon.client, batch_id) >= 2)
            full.enter_context(keep_full(state))
            wait_until(lambda: "a batch waits for room" in daemon.log.read_text(encoding="utf-8"))
            assert daemon.client.batches.retrieve(batch_id).status == "in_progress"
            with pytest.raises(openai.InternalServerError, match="No space left on device") as refused:
                upload(daemon.client, completions(2000))
            assert refused.value.status_code == 507
            with pytest.raises(openai.InternalServerError, match="No space left on device"):
                create(daemon.client, file_id)
            assert [one.id for one in daemon.client.batches.list()] == [batch_id]
            daemon.kill()
        with running(config) as daemon:
            wait_until(lambda: "a batch waits for room" in daemon.log.read_text(encoding="utf-8"))
            full.close()
            batch = wait_for_end(daemon.client, batch_id)
            assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 24, 0)
            results = lines_in(daemon.client, batch.output_file_id)
            assert len({result["custom_id"] for result in results}) == len(results) == 24
