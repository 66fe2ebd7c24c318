"""The disk that holds the state is full, and the daemon is killed: its streams are there all the same."""

from __future__ import annotations

from tests.daemon.test_killed import BODY, CHAT, Client, kill_in_mid_stream, workers_of, workers_of_state
from tests.support.daemon import configuration, running
from tests.support.small_disk import filled, small_disk

DISK_MIB = 32  # as in tools/chaos


def test_streams_that_began_on_a_full_disk_outlive_the_daemon(tmp_path):
    """All is on the full disk: the state, the store, the admin socket, the log. It stays full over the start."""
    with small_disk(tmp_path / "disk", DISK_MIB) as disk:
        config = configuration(disk, script="base_ms=20", extra="drafts: []")
        requests = [
            ("/v1/completions", BODY),
            ("/v1/completions", BODY | {"temperature": 0.0, "logprobs": 2}),
            ("/v1/chat/completions", CHAT),
        ]
        with running(config) as first:
            plain = [Client(*request) for request in requests]
            for client in plain:
                client.read(first.url)
                assert client.done
            clients = [Client(*request, key=f"k{index}" * (index % 2)) for index, request in enumerate(requests)]
            with filled(disk):
                kill_in_mid_stream(first, clients, 8)
                pids = workers_of_state(disk)
                assert not all(client.done for client in clients)
                with running(config) as second:
                    assert sorted(workers_of(second)) == sorted(pids)
                    for client, undisturbed in zip(clients, plain, strict=True):
                        if not client.done:
                            client.read(second.url)
                        assert set(client.statuses) == {200}
                        assert client.done
                        assert client.texts == undisturbed.texts
                        assert client.scores == undisturbed.scores
                        assert len(client.ids) == len(set(client.ids))
                    assert second.stop() == 0
