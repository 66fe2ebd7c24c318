"""OpenAI's routes for files and batches on a real daemon, by OpenAI's own client."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from backports import zstd
from openai import OpenAI
from outrider_lab.free_port import find_free_port

from tests.batches.support import kill_worker, line_of, slow_down, slow_script, wait_until
from tests.support.daemon import Daemon, configuration, running

ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("routes")
    extra = "drafts: []\nbatches: {max_file: 64 KiB, max_files: 12}"
    with running(configuration(directory, script=slow_script(directory), extra=extra)) as started:
        yield started
        assert '"request failed"' not in started.log.read_text()


def upload(client: OpenAI, lines: list[Any]) -> str:
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def create(client: OpenAI, file_id: str, endpoint: Any = "/v1/completions", **more: Any) -> str:
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **more).id


def wait_for_end(client: OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 240
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def count_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def lines_in(client: OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def completions(count: int, **body: Any) -> list[dict[str, Any]]:
    lines = [line_of(2 * number) for number in range(count)]
    for line in lines:
        line["body"] |= body
    return lines


def test_files_and_batches_as_openai_has_them(daemon):
    client = daemon.client
    bad = line_of(0, custom_id="refused")
    bad["body"] |= {"temperature": 9}
    file_id = upload(client, [*completions(6), "no JSON", bad])
    record = client.files.retrieve(file_id)
    assert (record.filename, record.purpose, record.status, record.object) == ("in.jsonl", "batch", "processed", "file")
    assert record.bytes == len(client.files.content(file_id).content)
    batch_id = create(client, file_id, metadata={"run": "7"})
    batch = wait_for_end(client, batch_id)
    assert batch.status == "completed"
    assert batch.metadata == {"run": "7"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (8, 6, 2)
    results = lines_in(client, batch.output_file_id)
    assert sorted(result["custom_id"] for result in results) == sorted(f"line-{2 * number}" for number in range(6))
    for result in results:
        body = dict(completions(6)[int(result["custom_id"][5:]) // 2]["body"])
        del body["ignore_eos"]
        told = client.completions.create(**body, extra_body={"ignore_eos": True})
        assert result["response"]["body"]["choices"][0]["text"] == told.choices[0].text
    errors = {result["custom_id"]: result["error"]["code"] for result in lines_in(client, batch.error_file_id)}
    assert errors == {None: "invalid_json_line", "refused": "invalid_value"}
    assert next(one.id for one in client.batches.list(limit=1)) == batch_id
    assert {one.purpose for one in client.files.list()} == {"batch", "batch_output"}
    for name in (file_id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(name).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(file_id)


def test_errors_have_openai_s_shape(daemon):
    client = daemon.client
    with pytest.raises(openai.BadRequestError, match="'purpose'") as refused:
        client.files.create(file=b"x", purpose="fine-tune")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.APIStatusError, match="larger than 65536 bytes") as large:
        client.files.create(file=b"x" * 70_000, purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        create(client, "file-nothing")
    with pytest.raises(openai.NotFoundError, match="there is no batch"):
        client.batches.retrieve("batch_nothing")
    with pytest.raises(openai.BadRequestError) as window:
        client.batches.create(input_file_id="x", endpoint="/v1/completions", completion_window="1h")
    assert window.value.param == "completion_window"
    cut = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = httpx.post(f"{daemon.url}/v1/files", content=b"--b\r\nno form", headers=cut)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert httpx.post(f"{daemon.url}/v1/files", json={}).status_code == 415
    empty = upload(client, [""])
    failed = wait_for_end(client, create(client, empty))
    assert failed.status == "failed"
    assert failed.errors.data[0].code == "invalid_input_file"
    while len(list(client.files.list())) < 12:
        upload(client, ["x"])
    with pytest.raises(openai.BadRequestError, match="as many as may be") as full:
        upload(client, ["x"])
    assert full.value.code == "files_full"
    for file in client.files.list():
        client.files.delete(file.id)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstd.compress), ("", bytes)])
def test_an_upload_may_come_packed_and_its_bounds_are_of_what_it_becomes(daemon, encoding, pack):
    head = {"Content-Type": "multipart/form-data; boundary=b", "Content-Encoding": encoding}
    purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n%s\r\n--b--\r\n'
    text = b'{"one": 1}\n' * 100
    answer = httpx.post(f"{daemon.url}/v1/files", content=pack(purpose + part % text), headers=head)
    assert answer.status_code == 200, answer.text
    assert daemon.client.files.content(answer.json()["id"]).content == text
    daemon.client.files.delete(answer.json()["id"])
    large = httpx.post(f"{daemon.url}/v1/files", content=pack(purpose + part % (b"x" * 70_000)), headers=head)
    assert large.status_code == 413
    other = httpx.post(f"{daemon.url}/v1/files", content=b"x", headers=head | {"Content-Encoding": "br"})
    assert (other.status_code, other.headers["Accept-Encoding"]) == (415, "gzip, zstd")


def test_a_batch_can_be_cancelled_and_keeps_what_it_has(daemon):
    client = daemon.client
    with slow_down(daemon.log.parent):
        batch_id = create(client, file_id := upload(client, completions(60, max_tokens=40)))
        wait_until(lambda: count_completed(client, batch_id) >= 3)
        with pytest.raises(openai.ConflictError, match="is the input of a batch"):
            client.files.delete(file_id)
        assert client.batches.cancel(batch_id).status == "cancelling"
        batch = wait_for_end(client, batch_id)
    assert batch.status == "cancelled"
    assert 3 <= batch.request_counts.completed == len(lines_in(client, batch.output_file_id)) < 60
    with pytest.raises(openai.ConflictError, match="has ended"):
        client.batches.cancel(batch_id)


def test_a_batch_goes_on_after_a_killed_worker_and_a_killed_daemon_and_stays_behind(tmp_path):
    extra = "drafts: []\nlimits: {max_running: 4}"
    config = configuration(tmp_path, script=slow_script(tmp_path), extra=extra)
    port = str(find_free_port())
    with slow_down(tmp_path), running(config, "--port", port) as daemon:
        batch_id = create(daemon.client, upload(daemon.client, completions(60)))
        wait_until(lambda: count_completed(daemon.client, batch_id) >= 5)
        assert daemon.status()["streams"] <= 3  # of four places one stays free
        answer = daemon.client.completions.create(model="toy", prompt="now", max_tokens=4)
        assert answer.metrics["queue_time_ms"] < 5000  # type: ignore[attr-defined]
        assert "outrider_batches{" in httpx.get(f"{daemon.url}/metrics").text
        kill_worker(daemon)
        done = count_completed(daemon.client, batch_id)
        wait_until(lambda: count_completed(daemon.client, batch_id) > done)
        daemon.kill()
    with running(config, "--port", port) as daemon:
        batch = wait_for_end(daemon.client, batch_id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 60, 60, 0)
        results = lines_in(daemon.client, batch.output_file_id)
        assert len({result["custom_id"] for result in results}) == len(results) == 60


def test_each_key_has_files_and_batches_of_its_own(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ada-key\neve-key\n")
    keys.chmod(0o600)
    config = configuration(tmp_path, extra="drafts: []")
    config.write_text(config.read_text().replace("api: {", f"api: {{keys_file: '{keys}', "))
    with running(config) as daemon:
        ada = OpenAI(base_url=f"{daemon.url}/v1", api_key="ada-key", max_retries=0)
        eve = OpenAI(base_url=f"{daemon.url}/v1", api_key="eve-key", max_retries=0)
        with ada, eve:
            file_id = upload(ada, completions(2))
            batch = wait_for_end(ada, create(ada, file_id))
            assert batch.request_counts.completed == 2
            for mine in (lambda: eve.files.content(file_id), lambda: eve.batches.retrieve(batch.id)):
                with pytest.raises(openai.NotFoundError):
                    mine()
            with pytest.raises(openai.NotFoundError):
                create(eve, file_id)
            assert not list(eve.files.list()) + list(eve.batches.list())
