"""How we want Ray: its driver process's environment, its options, and what is looked at before it is asked.

Nothing here imports ray; `ray_driver` and `ray_actor` do.

Where a Ray of our own keeps its sockets and logs: a directory of this user alone, removed behind it.

What a daemon left that was killed, the next one removes: whoever uses a directory holds the lock in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from orchestrator.errors import ClusterAway, WorkerError

_PREFIX = "outrider-ray-"
_LOCK = "lock"
_YOUNG_S = 60.0  # made, and perhaps not locked yet
_MOST_SOCKET_BYTES = 107  # of the path of a Unix socket, on Linux
_LONGEST_BELOW = "/outrider-ray-12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"
NAMESPACE = "outrider"
JOB_LIBRARIES = ("aiohttp", "aiohttp_cors", "opencensus")
"""What Ray's job server imports and Ray alone does not bring. `ray_driver` tries the server itself."""
WAY_OUT = "outrider extras install ray, or set cluster.runtime: local"
JOB_SERVER_WAY_OUT = "outrider extras install jobs (that is ray[default]), or leave cluster.job_server out"

# Of asking a cluster whether it wants a token (ADR 0048). Not tuned.
_PROBE_TIMEOUT_S = 5.0
_ASKED_WITHIN_S = 1.5  # as above, of one address, for `config check`
_MOST_PORT = 65_535  # TCP's
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # our frames are small; Ray's least is 75 MiB
# Of an embedded Ray: its only tenants are our workers, so it is not to ration them. Any number above that of workers
# does.
_LOGICAL_CPUS = 64
_LOG_FILE_BYTES = 10 * 1024 * 1024  # of an embedded Ray: its files may lie in memory. Not tuned.
# With a head that is away: by default Ray ends the process after 60 s, streams and all. ADR 0048.
_PATIENCE_S = 1_000_000
_TOKEN_NAMES = frozenset({"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})
_PACKAGES_ROOT = Path(__file__).resolve().parents[2]


class SessionDirectory:
    """A new directory below the first base that will do; locked until `remove`."""

    def __init__(self, bases: Iterable[Path] | None = None) -> None:
        base = _choose_base(usual_bases() if bases is None else bases)
        _remove_deserted(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = FileLock(self.path / _LOCK, thread_local=False)
        self._lock.acquire()

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def usual_bases() -> list[Path]:
    """Return the runtime directory of the service or the user, then the temporary one, then the one of the system."""
    named = (os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0], os.environ.get("XDG_RUNTIME_DIR"))
    return [*(Path(name) for name in named if name), Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 -- mkdtemp


def _choose_base(bases: Iterable[Path]) -> Path:
    tried = list(bases)
    for base in tried:
        if len(os.fsencode(base)) + len(_LONGEST_BELOW) <= _MOST_SOCKET_BYTES and os.access(base, os.W_OK | os.X_OK):
            return base
    longest = _MOST_SOCKET_BYTES - len(_LONGEST_BELOW)
    raise WorkerError(
        f"no directory for Ray's sockets: {', '.join(map(str, tried))} cannot be written to, or are longer than "
        f"{longest} bytes; set XDG_RUNTIME_DIR or TMPDIR to one that is shorter"
    )


def _remove_deserted(base: Path) -> None:
    for left in base.glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout):
            if left.stat().st_uid != os.getuid() or time.time() - left.stat().st_mtime < _YOUNG_S:
                continue
            with FileLock(left / _LOCK, timeout=0):
                shutil.rmtree(left, ignore_errors=True)


def driver_environment(
    address: str, *, has_token: bool, environment: Mapping[str, str], jobs: bool = False
) -> dict[str, str]:
    """Return the environment of a Ray driver process; what the operator set in `environment` stays.

    Raises WorkerError where the Ray at `address` is to be joined with a token (`has_token`) and there is none, or where
    one is to take `jobs` and nobody but itself would know its token.
    """
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # of a node that ends: what it ran goes on elsewhere at once
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES to adapters
        # Ray prints a page to stdout for each actor that dies; `ray_driver.reason` makes the line for our log.
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_PATIENCE_S),
    }
    forced: dict[str, str] = {}
    if address:
        wanted["RAY_NUM_REDIS_GET_RETRIES"] = "1"  # of 40 s each; Ray's own default is 20
        if has_token:
            wanted["RAY_AUTH_MODE"] = "token"
            require_token(address, environment)
        else:
            forced["RAY_AUTH_MODE"] = "disabled"
    else:
        if jobs:
            wanted["RAY_AUTH_MODE"] = "token"
            require_token("", environment)
            # Jobs find `outrider` where this one is.
            programs = str(Path(sys.executable).parent)
            forced["PATH"] = os.pathsep.join(filter(None, (programs, environment.get("PATH"))))
        wanted |= {"RAY_ROTATION_MAX_BYTES": str(_LOG_FILE_BYTES), "RAY_ROTATION_BACKUP_COUNT": "1"}
        if not _TOKEN_NAMES & environment.keys():
            # Ray listens on every interface, so whoever has no token must be refused. A token of its own is never
            # written to the home directory, which a service may not have.
            wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    whole = {**wanted, **environment, **forced}
    if _PACKAGES_ROOT.name not in ("site-packages", "dist-packages"):  # a checkout that is not installed
        whole["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(_PACKAGES_ROOT))))
    return whole


def require_token(address: str, environment: Mapping[str, str]) -> None:
    """Refuse to join where nobody is asked for a token: whoever reaches such a cluster runs code on its hosts. Raises
    WorkerError with the way out."""
    what = f"join Ray at {address}" if address else "start Ray with a job server"
    way_out = "or set cluster.auth: none, if that cluster has none" if address else "or leave cluster.job_server out"
    mode = environment.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token":
        raise WorkerError(f"cannot {what}: RAY_AUTH_MODE={mode} joins without a token; unset RAY_AUTH_MODE, {way_out}")
    if environment.get("RAY_ENABLE_K8S_TOKEN_AUTH", "0") == "0" and not read_token(environment):
        raise WorkerError(
            f"cannot {what} without its token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that "
            f"has it ({find_token_path(environment)} has none), {way_out}"
        )


def find_token_path(environment: Mapping[str, str]) -> Path:
    """Return the file in which Ray looks for its token, where no variable has it."""
    named = environment.get("RAY_AUTH_TOKEN_PATH", "")
    return Path(named) if named else Path(environment.get("HOME", "~")).expanduser() / ".ray" / "auth_token"


def read_token(environment: Mapping[str, str]) -> str:
    """Return the token that Ray finds; "" where it finds none."""
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    try:
        return find_token_path(environment).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def save_token(token: str, environment: Mapping[str, str]) -> Path:
    """Keep a token where Ray looks for it, for this user alone; returns the file. Raises WorkerError."""
    path = find_token_path(environment)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"{token.strip()}\n")
    except OSError as error:
        raise WorkerError(f"the token cannot be kept in {path}: {error.strerror}; set RAY_AUTH_TOKEN_PATH") from error
    return path


async def probe(address: str) -> None:
    """Raise ClusterAway where nothing listens: at once, while Ray tries for 40 s."""
    place = split_address(address)
    if place is None:
        return
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*place)
    except OSError as error:  # TimeoutError is one
        raise ClusterAway(
            f"cannot join Ray at {address}: {type(error).__name__}: {error}; is it running (ray start --head)?"
        ) from error
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def find_head_problem(address: str) -> str:
    """Return why nothing can be joined at an address of Ray now, "" where something listens there. Blocks for 1.5 s at
    most, whatever name servers do."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "") or _read_last_started()
        if not address:
            return "nobody has started Ray on this machine (ray start)"
    place = split_address(address)
    if place is None:
        return f"{address} is no HOST:PORT"
    problems = [f"{address} does not answer within {_ASKED_WITHIN_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection(place, _ASKED_WITHIN_S).close()
            problems.append("")
        except OSError as error:
            problems.append(f"{address} does not answer: {error.strerror or error}")

    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(_ASKED_WITHIN_S)
    return problems[-1]


def find_bind_problem(address: str) -> str:
    """Return why nothing of this machine can be at an address, "" where something can."""
    place = split_address(address)
    if place is None:
        return f"{address} is no HOST:PORT"
    try:
        family, kind, _, _, target = socket.getaddrinfo(place[0], 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as own:
            own.bind(target)
    except OSError as error:
        return f"{place[0]} is no address of this machine: {error.strerror or error}"
    return ""


def _read_last_started() -> str:
    """Return the address that `ray start` left for `auto`; "" where nobody has run it."""
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  # as Ray looks for it
    try:
        return (Path(directory) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def split_address(address: str) -> tuple[str, int] | None:
    host, colon, port = address.rpartition(":")
    good = bool(colon) and port.isdecimal() and int(port) <= _MOST_PORT
    return (host.strip("[]"), int(port)) if good else None


def init_options(address: str, directory: str, *, jobs: bool = False) -> dict[str, Any]:
    quiet = {"log_to_driver": True, "configure_logging": False, "logging_level": logging.WARNING}
    if address:
        return {"address": address, "namespace": NAMESPACE, **quiet}
    return {
        "address": "local",  # whatever RAY_ADDRESS says: the configuration asked for our own
        "namespace": NAMESPACE,
        "include_dashboard": jobs,
        "num_cpus": _LOGICAL_CPUS,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_temp_dir": directory,
        "_system_config": {"prestart_worker_first_driver": False},  # no idle processes for CPUs we only claim
        **quiet,
    }
