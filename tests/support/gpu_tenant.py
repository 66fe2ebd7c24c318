"""A Ray of one host that counts two GPUs, which need not be there, and another tenant of it that takes some.

Run as a process of its own, it prints the address. For each line that it reads then it asks for a GPU, and prints its
name once it has it: as CUDA_VISIBLE_DEVICES shows it to the tenant.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

GPUS = 2
_MOST_ATTEMPTS = 4
_PATIENCE = {"RAY_raylet_start_wait_time_s": "240"}


class GpuTenant:
    """The process. `address`: of its Ray."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self.read()
        assert self.address, "Ray has not started"

    def ask(self) -> None:
        """Ask for a GPU, and keep it."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def has_told(self, within_s: float) -> bool:
        """Return whether it prints anything by then."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], within_s)[0])

    def read(self) -> str:
        """Return what it prints next."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def start_gpu_tenant(environment: Mapping[str, str]) -> Iterator[GpuTenant]:
    """Start it, with these variables beside ours, and end it."""
    command = [sys.executable, "-m", "tests.support.gpu_tenant"]
    with subprocess.Popen(
        command,
        env={**os.environ, **_PATIENCE, **environment},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield GpuTenant(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def main() -> None:
    import ray

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory:
        _tell(_start_ray(ray, directory))
        holders: list[Any] = []
        for _ in sys.stdin:
            holders.append(ray.remote(num_cpus=0, num_gpus=1)(_Holder).remote())
            _tell(ray.get(holders[-1].read_shown.remote()))
        ray.shutdown()


def _start_ray(ray: Any, directory: str) -> str:
    """Start it, again where it gives up, as it does on a busy machine. Returns its address."""
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        try:
            context = ray.init(
                address="local",
                num_cpus=16,
                num_gpus=GPUS,
                include_dashboard=False,
                object_store_memory=80 << 20,
                log_to_driver=False,
                _temp_dir=directory,
            )
            return str(context.address_info["gcs_address"])
        except Exception:  # Ray has no class of its own for it
            ray.shutdown()
            if attempt == _MOST_ATTEMPTS:
                raise
    raise AssertionError


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class _Holder:
    def read_shown(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    main()
