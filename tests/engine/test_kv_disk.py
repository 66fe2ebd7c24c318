"""What several requests begin with is kept on disk, read by a worker that starts anew, and changes no token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adapters.loaded_model import LoadedModel
from orchestrator.protocol.commands import Submit
from orchestrator.worker.engine.kv_transfer.disk import LEAST_POSITIONS, KvDisk
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from tests.support.loops import END, decode, loop_over, suffix, toy
from tests.support.waiting import until

BLOCK = 16
SYSTEM = [(7 * i) % 250 for i in range(LEAST_POSITIONS + BLOCK + 5)]
WHOLE = len(SYSTEM) // BLOCK * BLOCK
MOST_BYTES = 64 << 20


def request(key: str, *ends: int, seed: int | None = None) -> Submit:
    sampling = Sampling() if seed is None else Sampling(0.8, seed=seed)
    return Submit(key, [*SYSTEM, *ends], 24, sampling, stop_tokens=[END])


def open_loop(root: Path, model: LoadedModel | None = None, most_bytes: int = MOST_BYTES) -> tuple[DecodeLoop, KvDisk]:
    model = model or toy()
    disk = KvDisk(KvMover(model, "toy"), root, most_bytes)
    return loop_over(model, suffix(), kept=disk), disk


def list_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.kv"))


def keep_system_prompt(root: Path) -> None:
    """Let a worker answer three requests that begin alike: it keeps the beginning for the third."""
    loop, _ = open_loop(root)
    for key, end in (("a", 1), ("b", 2)):
        decode(loop, [request(key, end)])
        assert not list_files(root)
    decode(loop, [request("c", 3)])
    until(lambda: list_files(root), 20.0)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_worker_that_starts_anew_reads_what_it_would_compute_and_says_the_same(tmp_path, seed):
    keep_system_prompt(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in list_files(tmp_path)] == [0o600]
    expected, rounds = decode(loop_over(toy(), None), [request("d", 4, seed=seed)])
    loop, _ = open_loop(tmp_path)
    out, fewer = decode(loop, [request("d", 4, seed=seed)])
    assert out == expected
    assert loop.gauges(0).prefix_loaded == loop.gauges(0).prefix_hits == WHOLE
    assert sum(done.rows for done in fewer) < sum(done.rows for done in rounds) - WHOLE // 2  # drafts have rows, too
    decode(loop, [request("e", 5)])  # it is remembered now, and not read again
    assert loop.gauges(0).prefix_loaded == WHOLE


def test_a_conversation_that_grows_is_not_kept(tmp_path):
    loop, _ = open_loop(tmp_path)
    tokens = list(SYSTEM)
    for turn in range(4):
        answers, _ = decode(loop, [Submit(str(turn), tokens, 24, stop_tokens=[END])])
        tokens = [*tokens, *answers[str(turn)], *range(40)]
    assert not list_files(tmp_path)


@pytest.mark.parametrize("damage", ["a byte", "cut", "empty", "other tokens"])
def test_a_damaged_file_is_removed_and_computed_anew(tmp_path, capfd, damage):
    keep_system_prompt(tmp_path)
    (path,) = list_files(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "a byte":
        content[-100] ^= 1
    elif damage == "other tokens":
        place = content.index(b"tokens") + 20
        content[place] ^= 1
    path.write_bytes(content[: {"cut": len(content) - 7, "empty": 0}.get(damage, len(content))])
    loop, _ = open_loop(tmp_path)
    expected, _ = decode(loop_over(toy(), None), [request("d", 4)])
    assert decode(loop, [request("d", 4)])[0] == expected
    assert loop.gauges(0).prefix_loaded == 0
    assert not list_files(tmp_path)
    assert "is removed" in capfd.readouterr().err


def test_files_take_no_more_than_their_bound_and_the_one_used_least_recently_goes(tmp_path):
    keep_system_prompt(tmp_path)
    (first,) = list_files(tmp_path)
    os.utime(first, (1, 1))
    unfinished = first.with_name(f".{first.name}.1-aa.new")  # whose writer was killed
    unfinished.write_bytes(first.read_bytes())
    os.utime(unfinished, (0, 0))
    loop, _ = open_loop(tmp_path, most_bytes=first.stat().st_size + 1000)
    other = [(11 * i) % 250 for i in range(WHOLE)]
    for key, end in (("a", 1), ("b", 2), ("c", 3)):
        decode(loop, [Submit(key, [*other, end], 4, stop_tokens=[END])])
    until(lambda: first not in (kept := list_files(tmp_path)) and len(kept) == 1)
    assert not unfinished.exists()
    tight, _ = open_loop(tmp_path / "tight", most_bytes=1000)
    for key, end in (("a", 1), ("b", 2), ("c", 3)):
        decode(tight, [Submit(key, [*other, end], 4, stop_tokens=[END])])
    assert not list_files(tmp_path / "tight")


def test_a_beginning_of_another_format_is_not_used(tmp_path):
    keep_system_prompt(tmp_path)
    model = toy()
    loop = loop_over(model, None, kept=KvDisk(KvMover(model, "another class"), tmp_path, MOST_BYTES))
    decode(loop, [request("d", 4)])
    assert loop.gauges(0).prefix_loaded == 0


def test_a_full_disk_costs_nothing_but_the_file(tmp_path, capfd):
    (tmp_path / "kv").write_text("a file where the directory is to be")
    loop, _ = open_loop(tmp_path / "kv")
    expected, _ = decode(loop_over(toy(), None), [request(key, 1) for key in "abc"])
    assert decode(loop, [request(key, 1) for key in "abc"])[0] == expected
    for key, end in (("d", 2), ("e", 3), ("f", 4)):
        decode(loop, [request(key, end)])
    until(lambda: "is not kept" in capfd.readouterr().err, 20.0)
