"""A model whose files are replaced while it is served: workers that start again load what was loaded first."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest

from tests.support import tiny_gguf, tiny_models
from tests.support.cut_streams import Client
from tests.support.daemon import Daemon, outrider_process, running
from tests.support.tiny_gguf import Tiny
from tests.support.waiting import until

TOKENS, LONG = 1500, 6000
FEW = 40
TRIES = 10
"""On a busy machine a stream may be over before anything is done to its worker."""
PROMPT = "hello-the-hello"
LETTERS = (*map(chr, range(ord("!"), ord("~"))), "xy")
MODEL = Tiny("llama", vocabulary=len(LETTERS), context=8192, words=LETTERS, seed=10)
ALIKE = replace(MODEL, seed=40)
ANOTHER = replace(MODEL, seed=30)
UNLIKE = replace(MODEL, words=LETTERS[::-1], seed=3)
LARGER = replace(MODEL, vocabulary=len(LETTERS) + 1, words=("\u0120", *LETTERS), layers=3, seed=3)

Replace = Callable[[Path], None]


def configure(directory: Path, source: str, store: Path, *, model: str = "", tail: str = "drafts: []") -> Path:
    """Write a cluster.yaml over a model that computes."""
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: {source}, name: tiny, activations: fp32{model}}}\n"
        "cluster: {runtime: local, max_restarts: 50}\nlimits: {kv_cache: 16 MiB, max_running: 4}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{store}'}}\n"
        f"state: {{directory: '{directory}/state'}}\nlogging: {{format: json}}\n{tail}\n"
    )
    return path


def ask(daemon: Daemon, tokens: int = FEW) -> str:
    answer = daemon.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=tokens, temperature=0.0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def open_stream(daemon: Daemon, tokens: int = TOKENS) -> Iterator[Any]:
    return iter(
        daemon.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=tokens, temperature=0.0, stream=True)
    )


def read(stream: Iterator[Any], pieces: int = 1_000_000) -> tuple[str, set[str]]:
    """Return the text of so many pieces of a stream, and all the fingerprints that they had."""
    text, prints = "", set()
    for _, chunk in zip(range(pieces), stream, strict=False):
        prints.add(chunk.system_fingerprint)
        text += "".join(choice.text for choice in chunk.choices)
    return text, prints


def find_worker(daemon: Daemon) -> int:
    return int(daemon.status()["ready"]["pid"])


def reload(daemon: Daemon, *arguments: str) -> str:
    done = outrider_process("reload", "--socket", str(daemon.admin), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_over(path: Path, tiny: Tiny) -> None:
    """Replace a file as downloads do: by another one under its name."""
    tiny_gguf.write(path.with_suffix(".new"), tiny)
    path.with_suffix(".new").rename(path)


def write_in_place(path: Path, tiny: Tiny = ALIKE) -> None:
    """Replace a file's content, with neither size nor inode nor date telling."""
    before = path.stat()
    tiny_gguf.write(path.with_suffix(".new"), tiny)
    with path.open("r+b") as stream:
        stream.write(path.with_suffix(".new").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def truncate(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


REPLACEMENTS: dict[str, Replace] = {
    "by another model": lambda path: write_over(path, ALIKE),
    "by one of another vocabulary": lambda path: write_over(path, LARGER),
    "in place": write_in_place,
    "by a part of it": truncate,
    "by nothing": Path.unlink,
}


def decode_expected(tiny: Tiny, path: Path) -> str:
    """Greedy decoding by the formulas."""
    arrays = tiny_gguf.write(path, tiny)
    ids = [tiny.words.index(letter) for letter in PROMPT]
    for _ in range(8):
        row = tiny_gguf.logits(tiny, arrays, ids)[-1]
        second, first = np.sort(row)[-2:]
        assert first - second > 0.02, "two tokens are as good as equal: choose another seed"
        ids.append(int(row.argmax()))
    return "".join(tiny.words[index] for index in ids[len(PROMPT) :])


def end_stopped(worker: int) -> None:
    """Kill a worker that stands still, unless the daemon was first to end one that hangs."""
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


def lose_worker_in_mid_stream(daemon: Daemon, change: Callable[[], object], whole: str) -> bool:
    """Make a change while a stream's worker stands still, and kill that. The text is to be the `whole`; returns whether
    there was much of it left."""
    worker = find_worker(daemon)
    stream = open_stream(daemon)
    begun, before = read(stream, 20)
    os.kill(worker, signal.SIGSTOP)
    change()
    end_stopped(worker)
    rest, after = read(stream)
    assert begun + rest == whole
    assert before == after
    return len(rest) > len(whole) / 4


def test_a_worker_that_starts_again_loads_what_was_loaded_first_whatever_became_of_the_file(
    tmp_path: Path, shared_store: Path
) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf.write(path, MODEL)
    with running(configure(tmp_path, "m.gguf", shared_store)) as daemon:
        whole = ask(daemon, TOKENS)
        assert whole.startswith(decode_expected(MODEL, tmp_path / "again.gguf"))
        digest = daemon.status()["ready"]["model_digest"]
        for change in REPLACEMENTS.values():
            for _ in range(TRIES):
                write_over(path, MODEL)
                if lose_worker_in_mid_stream(daemon, partial(change, path), whole):
                    break
            else:
                raise AssertionError("each stream was over before its worker died")
            assert whole.startswith(ask(daemon))
            assert daemon.status()["ready"]["model_digest"] == digest
        write_over(path, LARGER)
        assert f"m.gguf: the model {digest} -> " in reload(daemon, "--check")
        assert daemon.status()["ready"]["model_digest"] == digest
        assert "the models that are there now are served" in reload(daemon)
        assert ask(daemon).startswith(decode_expected(LARGER, tmp_path / "again.gguf"))
        ready = daemon.status()["ready"]
        assert ready["model_digest"] != digest
        assert "nothing has changed" in reload(daemon)
        write_over(path, MODEL)
        os.kill(int(ready["pid"]), signal.SIGKILL)
        assert ask(daemon).startswith(decode_expected(LARGER, tmp_path / "again.gguf"))
        assert daemon.stop() == 0


def test_a_stream_that_runs_during_a_reload_ends_on_the_model_that_it_began_with(
    tmp_path: Path, shared_store: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_over(path, UNLIKE)
    with running(configure(tmp_path, "m.gguf", shared_store)) as daemon:
        expected = ask(daemon)
        for _ in range(TRIES):
            write_over(path, MODEL)
            reload(daemon)
            whole = ask(daemon, LONG)
            stream = open_stream(daemon, LONG)
            begun, before = read(stream, 20)
            write_over(path, UNLIKE)
            assert "no stream was dropped" in reload(daemon)
            assert ask(daemon) == expected
            rest, after = read(stream)
            assert begun + rest == whole
            assert before == after
            log = daemon.log.read_text()
            if log.rindex(" takes the place of ") < log.rindex(f'"generated": {LONG}'):
                return
        raise AssertionError("each stream was over before its model was another one")


def test_where_neither_file_nor_store_has_the_model_it_is_said_until_one_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf.write(path, MODEL)
    with running(configure(tmp_path, "m.gguf", tmp_path / "store")) as daemon:
        whole = ask(daemon, TOKENS)
        digest = daemon.status()["ready"]["model_digest"]
        write_over(path, ALIKE)
        shutil.rmtree(tmp_path / "store")
        worker = find_worker(daemon)
        os.kill(worker, signal.SIGSTOP)  # no stream ends before its worker does
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(lambda: read(open_stream(daemon)))
            until(lambda: daemon.status()["streams"] or stream.done())
            end_stopped(worker)
            with pytest.raises(openai.APIError, match="run `outrider reload`"):
                stream.result()
        detail = daemon.status()["detail"]
        assert f"m.gguf: this daemon serves the model with the digest {digest}" in detail
        assert "there is another one at its place now" in detail
        assert "\n" not in detail
        answer = httpx.get(f"{daemon.url}/ready")
        assert (answer.status_code, detail in answer.text) == (503, True)
        metrics = httpx.get(f"{daemon.url}/metrics").text
        assert 'outrider_replicas_failed{engine="0",model_name="tiny",reason="failed"} 1.0' in metrics
        with pytest.raises(openai.InternalServerError, match="another one at its place"):
            ask(daemon)
        log = daemon.log.read_text()
        assert "Traceback" not in log
        assert log.count('"event": "worker target started') == 2, "it is not tried again and again"
        write_over(path, MODEL)
        reload(daemon)
        assert whole.startswith(ask(daemon))
        os.kill(find_worker(daemon), signal.SIGKILL)
        assert whole.startswith(ask(daemon))
        assert daemon.stop() == 0


def copy_over(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def forget_merges(first: Path) -> None:
    words = json.loads((first / "tokenizer.json").read_text())
    words["model"]["merges"] = []
    (first / "tokenizer.json").write_text(json.dumps(words))


def point(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


SWAPS: dict[str, Callable[[Path, Path], object]] = {
    "weights": lambda first, second: [shutil.copy(one, first) for one in second.glob("*s")],
    "the whole directory": lambda first, second: copy_over(second, first),
    "a link": lambda first, second: point(first.parent / "served", second),
    "the tokenizer": lambda first, _: forget_merges(first),
    "the template": lambda first, _: (first / "chat_template.jinja").write_text("{{ raise_exception('no') }}"),
    "nothing left": lambda first, _: shutil.rmtree(first),
}


def ask_chat(daemon: Daemon) -> str:
    """Ask for what weights, tokenizer and template decide."""
    answer = daemon.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello the hello"}],
        max_tokens=FEW,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    return f"{answer.usage}: {answer.choices[0].message.content}"


def test_a_directory_counts_with_all_its_files(tmp_path: Path, shared_store: Path) -> None:
    kept = tiny_models.write_model(tmp_path / "kept", "llama", shards=2)
    first, second = tmp_path / "first", tiny_models.write_model(tmp_path / "second", "llama", num_hidden_layers=3)
    served = tmp_path / "served"
    copy_over(kept, first)
    served.symlink_to(first)
    with running(configure(tmp_path, "served", shared_store)) as daemon:
        whole = ask_chat(daemon)
        digest = daemon.status()["ready"]["model_digest"]
        for swap in SWAPS.values():
            copy_over(kept, first)
            point(served, first)
            swap(first, second)
            os.kill(find_worker(daemon), signal.SIGKILL)
            assert ask_chat(daemon) == whole
            assert daemon.status()["ready"]["model_digest"] == digest
        point(served, second)
        reload(daemon)
        assert ask_chat(daemon) != whole
        assert daemon.status()["ready"]["model_digest"] != digest


@pytest.mark.parametrize("process", ["target", "own"])
def test_a_draft_is_what_it_was_at_first_until_a_reload(tmp_path: Path, shared_store: Path, process: str) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", MODEL)
    tiny_gguf.write(tmp_path / "d.gguf", ALIKE)
    draft = f"drafts: [{{method: model, source: d.gguf, process: {process}, kv_cache: 16 MiB, activations: fp32}}]"

    def find_draft() -> dict[str, Any]:
        drafters = (daemon.status()["gauges"] or {}).get("drafters") or [{}]
        return dict(drafters[0])

    digest = ""

    def find_digest() -> str:
        ready = daemon.status()["ready"]
        if process == "target":
            return str(ready["identities"][1]["digest"])
        known = daemon.status()["drafts"][0]["ready"]
        return str(known["drafter"]["identity"]["digest"]) if known is not None else digest

    def works() -> bool:
        return find_draft().get("state") == "ok" and bool(daemon.status()["gauges"])

    def kill() -> None:
        pid = daemon.status()["ready" if process == "target" else "drafts"]
        number = pid["pid"] if process == "target" else pid[0]["ready"]["pid"]
        os.kill(number, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(number))

    with running(configure(tmp_path, "m.gguf", shared_store, tail=draft)) as daemon:
        whole = ask(daemon, TOKENS)
        until(works)
        digest = find_digest()
        write_over(tmp_path / "d.gguf", UNLIKE)
        kill()
        assert whole.startswith(ask(daemon))
        until(works)
        assert find_digest() == digest
        write_over(tmp_path / "d.gguf", ANOTHER)
        target = find_worker(daemon)
        assert "d.gguf: the model" in reload(daemon)
        until(lambda: works() and find_digest() != digest)
        assert find_worker(daemon) == target, "a draft is exchanged under a target that goes on"
        assert whole.startswith(ask(daemon))


def test_the_next_daemon_takes_the_workers_it_finds_and_no_stream_changes_its_model(
    tmp_path: Path, shared_store: Path
) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf.write(path, MODEL)
    config = configure(tmp_path, "m.gguf", shared_store)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    with running(config) as daemon:
        whole = ask(daemon, TOKENS)
        client = Client("/v1/completions", body, key="one")
        client.read(daemon.url, events=10)
        other = Client("/v1/completions", body, key="two")
        other.read(daemon.url, events=10)
        worker = find_worker(daemon)
        os.kill(worker, signal.SIGKILL)  # the next one is told what to load, and is adopted all the same
        assert whole.startswith(ask(daemon))
        worker = find_worker(daemon)
        write_over(path, UNLIKE)
        daemon.kill()
    with running(config) as daemon:
        assert find_worker(daemon) == worker
        client.read(daemon.url)
        assert client.texts[0] == whole
        os.kill(worker, signal.SIGKILL)
        assert whole.startswith(ask(daemon))
        worker = find_worker(daemon)
        daemon.kill()
        os.kill(worker, signal.SIGKILL)
    with running(config) as daemon:
        assert ask(daemon).startswith(decode_expected(UNLIKE, tmp_path / "again.gguf"))
        other.read(daemon.url)
        assert other.statuses[-1] == 410
        assert not other.done


def test_replicas_and_standbys_that_start_later_load_what_the_first_did(tmp_path: Path, shared_store: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf.write(path, MODEL)
    standby = "drafts: []\nfailover: {after_s: 0, standby: [{readiness: cold}]}"
    with running(configure(tmp_path, "m.gguf", shared_store, model=", replicas: 2", tail=standby)) as daemon:
        whole = ask(daemon, TOKENS)
        until(lambda: all(one["phase"] == "ready" for one in daemon.status()["replicas"]))
        write_over(path, UNLIKE)
        for one in daemon.status()["replicas"]:
            os.kill(one["ready"]["pid"], signal.SIGKILL)
        assert whole.startswith(ask(daemon))
        until(lambda: all(one["phase"] == "ready" for one in daemon.status()["replicas"]))
        assert len({one["ready"]["model_digest"] for one in daemon.status()["replicas"]}) == 1
        assert whole.startswith(ask(daemon))
        assert "all together" in reload(daemon)
        assert len({one["ready"]["model_digest"] for one in daemon.status()["replicas"]}) == 1
        assert ask(daemon).startswith(decode_expected(UNLIKE, tmp_path / "again.gguf"))
