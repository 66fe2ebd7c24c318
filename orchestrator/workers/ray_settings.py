"""How we want Ray: its environment while it is connected, its options, and what is tried before it is asked.

Nothing here imports ray; `ray_runtime` does.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from typing import Any

NAMESPACE = "outrider"

_PROBE_TIMEOUT_S = 5.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # our frames are small; Ray's least is 75 MiB
_LOGICAL_CPUS = 64  # of an embedded Ray: its only tenants are our workers, so it is not to ration them
_SET_BY_RAY = ("PYTHONBREAKPOINT",)
_TOKEN_NAMES = frozenset({"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})


def set_environment(address: str) -> dict[str, str | None]:
    """Set what ray reads while it is imported, and the processes that it starts read; what the operator set stays.

    Returns what `restore_environment` needs. Left behind, these would be the settings of whatever else this process
    starts: a node of Ray with our one try finds no head that is a second old.
    """
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES to adapters
        # Ray prints a page to stdout for each actor that dies; `ray_runtime.reason` makes the line for our log.
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    }
    if address:
        wanted["RAY_NUM_REDIS_GET_RETRIES"] = "1"  # of 40 s each; Ray's own default is 20
    elif not _TOKEN_NAMES & os.environ.keys():
        # Ray listens on every interface, so whoever has no token must be refused. A token of its own is never
        # written to the home directory, which a service may not have.
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in (*wanted, *_SET_BY_RAY)}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return before


def restore_environment(before: dict[str, str | None]) -> None:
    """Give variables the values that they had (None: not set)."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def probe(address: str) -> None:
    """Raise OSError where nothing listens: at once, while Ray tries for 40 s."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()


def init_options(address: str) -> dict[str, Any]:
    """Return the arguments of ray.init."""
    quiet = {"log_to_driver": True, "configure_logging": False, "logging_level": logging.WARNING}
    if address:
        return {"address": address, "namespace": NAMESPACE, **quiet}
    return {
        "address": "local",  # whatever RAY_ADDRESS says: the configuration asked for our own
        "namespace": NAMESPACE,
        "include_dashboard": False,
        "num_cpus": _LOGICAL_CPUS,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_system_config": {"prestart_worker_first_driver": False},  # no idle processes for CPUs we only claim
        **quiet,
    }
