"""A real image: built by the script of a release on a Debian made here, and run with a root file system that is
read-only, as a user that is not root; alone, and as the front and the worker of the compose file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from tests.support.hosts import Hosts, two_hosts
from tests.support.steady_clients import keep_asking
from tests.support.waiting import until
from tests.test_wheel import PACKAGES

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "packaging" / "compose.yaml").read_text(encoding="utf-8"))
FRONT_IP: str = COMPOSE["services"]["front"]["networks"]["cluster"]["ipv4_address"]
PROGRAMS = ("buildah", "podman", "runc", "mmdebstrap")
BASE = "docker.io/library/debian:trixie-slim"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CONTAINER, PORT = "outrider-test", 8147
WITHIN_S = 600.0
USER = 10001
MISSING = [name for name in PROGRAMS if shutil.which(name) is None] or (["root"] if os.getuid() else [])
Podman = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def run(*command: object, **options: Any) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def make_release(directory: Path) -> Path:
    """Return a directory with a wheel and the locks."""
    source, dist = directory / "source", directory / "dist"
    dist.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel = ("wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, source)
    run(sys.executable, "-m", "pip", *wheel)
    for lock in (ROOT / "locks").glob("*.txt"):
        shutil.copy(lock, dist)
    return dist


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman over a storage of its own, in which the image `outrider:test` is."""
    if MISSING:
        pytest.skip(f"not here: {', '.join(MISSING)} (Debian has packages of the programs)")
    work = tmp_path_factory.mktemp("images")
    storage = ("--root", work / "storage", "--runroot", work / "run")
    # No limit is raised: not every machine's root may.
    (work / "containers.conf").write_text("[containers]\ndefault_ulimits = []\n[engine]\nevents_logger = 'file'\n")
    settings = os.environ | {"CONTAINERS_CONF": str(work / "containers.conf")}

    def use(*words: object) -> subprocess.CompletedProcess[str]:
        command = ["podman", *storage, "--cgroup-manager", "cgroupfs", "--runtime", shutil.which("runc"), *words]
        return subprocess.run([*map(str, command)], env=settings, capture_output=True, text=True, check=False)

    builder = " ".join(map(str, ("buildah", *storage)))
    run("mmdebstrap", "--quiet", "--variant=minbase", "trixie", work / "base.tar")
    (work / "Base").write_text("FROM scratch\nADD base.tar /\n")
    (work / "pip.conf").write_text("[global]\ncert = /certificates.crt\n")  # registries that this machine trusts
    mounts = f"--volume {CERTIFICATES}:/certificates.crt:ro --volume {work}/pip.conf:/etc/pip.conf:ro"
    options = "--quiet --isolation chroot --pull-never --network host"
    run(*builder.split(), "build", *options.split(), "--file", work / "Base", "--tag", BASE, work)
    output = run(
        "sh",
        ROOT / "packaging" / "build_images.sh",
        make_release(work),
        "cpu",
        env=os.environ | {"BUILDER": builder, "BUILD_OPTIONS": f"{options} {mounts}", "IMAGE": "localhost/outrider"},
    )
    image = output.split()[-1]
    try:
        assert use("tag", image, "localhost/outrider:test").returncode == 0
        yield use
    finally:
        use("rm", "--force", CONTAINER)
        use("rmi", "--all", "--force")


def wait_ready() -> float:
    """Return after how many seconds the daemon was ready."""
    began = time.monotonic()
    while time.monotonic() < began + WITHIN_S:
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/ready", timeout=5).json()["status"] == "ready":
                return time.monotonic() - began
        except (httpx.HTTPError, KeyError, ValueError):
            pass
        time.sleep(0.2)
    raise AssertionError("the container was never ready")


def test_an_image_starts_read_only_as_a_user_answers_and_ends(podman: Podman) -> None:
    settings = json.loads(podman("image", "inspect", "localhost/outrider:test").stdout)[0]
    assert settings["Config"]["User"] == "10001:10001"
    command = settings["Config"]["Cmd"]
    strict = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")  # noqa: S108
    open_to = ("--network", "host", "--no-healthcheck", "--volume", f"{CONTAINER}:/var/lib/outrider")
    image = ("localhost/outrider:test", *command, "--port", PORT)
    started = podman("run", "--detach", "--name", CONTAINER, *strict, *open_to, *image)
    assert started.returncode == 0, started.stderr
    wait_ready()
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["text"].startswith(" Paris"), answer
    inside = ("exec", CONTAINER)
    assert podman(*inside, "id", "-u").stdout.strip() == "10001"
    assert "Read-only file system" in podman(*inside, "touch", "/opt/outrider/x").stderr
    probe = podman(*inside, "outrider", "health", "--ready", "--port", PORT)
    assert (probe.returncode, probe.stdout) == (0, "ready\n")
    doctor = json.loads(podman(*inside, "outrider", "doctor", "--json").stdout)
    checks = {check["name"]: check for check in doctor}
    assert checks["versions that decide bits"]["found"] == "as tested"
    assert [check for check in doctor if check["verdict"] == "fail"] == []
    assert podman("stop", "--time", 90, CONTAINER).returncode == 0
    state = json.loads(podman("inspect", CONTAINER).stdout)[0]["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)


def write_files(directory: Path, podman: Podman, hosts: Hosts) -> str:
    """Write what the head of the compose file says how to make, for these hosts; returns the key of a client."""
    config = (ROOT / "packaging" / "cluster.yaml").read_text(encoding="utf-8")
    config = config.replace("replicas: 2", f"replicas: [{{host: here}}, {{host: {hosts.far_ip}}}]")
    # A plan would leave one of two hosts out that share their cores.
    for key, value in (("adapter", "openvino_rt"), ("device", "CPU")):
        config = config.replace(f"{key}: auto", f"{key}: {value}")
    (directory / "cluster.yaml").write_text(config.replace(FRONT_IP, hosts.near_ip))
    (directory / "cluster-token").write_text(os.urandom(32).hex())
    os.chown(directory, USER, USER)
    mine = ("--volume", f"{directory}:/here", "localhost/outrider:test")
    made = podman("run", "--rm", "--network", "none", *mine, "keys", "create", "me", "--file", "/here/keys")
    assert made.returncode == 0, made.stderr
    os.chown(directory / "cluster-token", USER, USER)
    os.chmod(directory / "cluster-token", 0o600)
    return made.stdout.strip()


def start_service(name: str, podman: Podman, files: Path, host: str, hosts: Hosts) -> None:
    """Start a container as the compose file says, on a host of its own."""
    service = COMPOSE["services"][name]
    options = ["--read-only", "--shm-size", service["shm_size"]]
    assert service["read_only"]
    for option, key in (("--tmpfs", "tmpfs"), ("--cap-drop", "cap_drop"), ("--security-opt", "security_opt")):
        options += [word for value in service[key] for word in (option, value)]
    for variable, value in service.get("environment", {}).items():
        options += ["--env", f"{variable}={value}"]
    mounts = [f"{files}/{volume[2:]}" if volume[0] == "." else f"{CONTAINER}-{volume}" for volume in service["volumes"]]
    mounts += [f"{files}/{secret}:/run/secrets/{secret}:ro" for secret in service["secrets"]]
    options += [word for mount in mounts for word in ("--volume", mount)]
    command = [word.replace(FRONT_IP, hosts.near_ip) for word in service["command"]]
    place = ("--network", f"ns:/run/netns/{host}", "--no-healthcheck")
    image = "localhost/outrider:test"
    started = podman("run", "--detach", "--name", f"{CONTAINER}-{name}", *options, *place, image, *command)
    assert started.returncode == 0, started.stderr


def count_ready(podman: Podman) -> int:
    """Return how many replicas serve, as `outrider status` says in the front's container."""
    shown = podman("exec", f"{CONTAINER}-front", "outrider", "status", "--json")
    time.sleep(0.5)
    return sum(row["phase"] == "ready" for row in json.loads(shown.stdout)["replicas"]) if shown.returncode == 0 else 0


def test_front_and_worker_of_the_compose_file_serve_and_a_lost_worker_costs_no_stream(
    podman: Podman, tmp_path: Path
) -> None:
    def serve(hosts: Hosts) -> None:
        key = write_files(tmp_path, podman, hosts)
        start_service("front", podman, tmp_path, hosts.near, hosts)
        start_service("worker", podman, tmp_path, hosts.far, hosts)
        until(lambda: count_ready(podman) == 2, WITHIN_S)
        client = OpenAI(base_url=f"http://{hosts.near_ip}:8000/v1", api_key=key)
        prompts = ("The capital of France is", "Once upon a time", "def add(a, b):")
        asks: list[Any] = [
            {"model": "smollm2-135m-instruct", "prompt": text, "max_tokens": 48, "temperature": 0} for text in prompts
        ]
        expected = [client.completions.create(**ask).choices[0].text for ask in asks]
        with keep_asking(client, asks, expected) as clients:
            clients.wait_reading(len(asks))
            assert podman("rm", "--force", "--time", 0, f"{CONTAINER}-worker").returncode == 0
            until(lambda: count_ready(podman) == 1, WITHIN_S)
            clients.wait_answers(2 * len(asks))
            start_service("worker", podman, tmp_path, hosts.far, hosts)
            until(lambda: count_ready(podman) == 2, WITHIN_S)
            clients.wait_answers(2 * len(asks))

    with two_hosts() as hosts:
        try:
            hosts.on_near(partial(serve, hosts))
        finally:
            for name in COMPOSE["services"]:
                podman("rm", "--force", f"{CONTAINER}-{name}")
