"""`packaging/`: what images are made of is there, and what they run exists. `test_images.py` builds and runs one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"


def read_instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile, each with what follows it on one line."""
    text = (PACKAGING / "Containerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [
        (name, " ".join(rest.split()))
        for name, rest in re.findall(r"^([A-Z]+) (.*)$", lines.replace("\\\n", " "), re.M)
    ]


def list_final_stage(target: str) -> list[tuple[str, str]]:
    """Return what a target's image is made by, from its base on."""
    stages: dict[str, list[tuple[str, str]]] = {}
    own: list[tuple[str, str]] = []
    for name, rest in read_instructions():
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            own = stages[stage] = list(stages.get(base, []))
        else:
            own.append((name, rest))
    return stages[target]


def test_each_file_that_is_copied_is_in_a_release_or_made_by_a_stage():
    stages = [rest.partition(" AS ")[2] for name, rest in read_instructions() if name == "FROM"]
    made = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nrelease:")[2]
    for name, rest in read_instructions():
        if name != "COPY":
            continue
        if rest.startswith("--from="):
            assert rest.split()[0].removeprefix("--from=") in stages
            continue
        *sources, _ = rest.split()
        for source in sources:
            assert source == "outrider-*.whl" or (ROOT / "locks" / source).is_file(), source
            assert source == "outrider-*.whl" or f"locks/{source}" in made, f"make release leaves {source} out"


def test_all_that_is_installed_is_locked_with_its_hashes():
    installs = [part for _, rest in read_instructions() for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 4
    for command in installs:
        locked = "--require-hashes" in command and re.findall(r"-r /release/(\w+\.txt)", command)
        assert "--no-deps" in command
        assert locked or command.split()[-1] == "/release/outrider-*.whl"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_a_numbered_user_and_its_commands_are_ours(target, outrider):
    stage = list_final_stage(target)
    users = [rest for name, rest in stage if name == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]), "Kubernetes sees by the number that it is not root"
    entry = json.loads(dict(stage)["ENTRYPOINT"])
    assert entry == ["tini", "--", "outrider"]
    command, probe = json.loads(dict(stage)["CMD"]), json.loads(dict(stage)["HEALTHCHECK"].partition(" CMD ")[2])
    assert probe[0] == "outrider"
    assert outrider(command[0], "--help").returncode == 0
    assert all(option in outrider(*probe[1:2], "--help").stdout for option in probe[2:])
    written = [rest for name, rest in stage if name == "ENV" and "CACHE_DIRECTORY" in rest]
    volume = dict(stage)["VOLUME"]
    assert all(f"{key}={volume}" in written[0] for key in ("HOME", "CACHE_DIRECTORY", "STATE_DIRECTORY", "HF_HOME"))


def test_without_a_builder_the_script_says_so(tmp_path):
    (tmp_path / "outrider-9.8.7-py3-none-any.whl").touch()
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "ls", "basename", "cut", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    script = PACKAGING / "build_images.sh"
    done = subprocess.run(
        ["sh", script, tmp_path], env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no image was built: there is no podman, buildah or docker here")
    (tools / "builder").write_text('#!/bin/sh\necho "$@"\n')
    (tools / "builder").chmod(0o755)
    named = {"PATH": str(tools), "BUILDER": "builder", "BUILD_OPTIONS": "--network host", "IMAGE": "example.org/o"}
    done = subprocess.run(["sh", script, tmp_path, "cpu"], env=named, capture_output=True, text=True, check=True)
    assert "--format docker --network host" in done.stdout
    assert "--target cpu --tag example.org/o:9.8.7-cpu" in done.stdout
