"""Which code and environment a worker runs: a daemon adopts only a worker that it would start in the same way."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.model_pins import drop_identities

_PACKAGES = ("adapters", "device_profiles", "orchestrator", "policies")
_ROOT = Path(__file__).resolve().parents[2]
_DIGEST_BYTES = 16

# What the environment tells runtimes, loaders and Python; the rest (a terminal, a session) changes no worker.
_TELLING = (
    *("CUDA_", "GOMP_", "HF_", "KMP_", "LD_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENVINO_", "ORT_", "OV_"),
    *("PYTHON", "PYTORCH_", "TBB_", "TORCH_", "OUTRIDER_"),
)


def digest_worker(spec: WorkerSpec, environment: Mapping[str, str]) -> str:
    """Return what two workers share exactly where either could take the other's place. `environment`: the worker's.

    The content of their models is left out: a daemon that begins takes what the worker has loaded.
    """
    relevant = sorted((name, value) for name, value in environment.items() if name.startswith(_TELLING))
    whole = msgspec.msgpack.encode((drop_identities(spec), relevant, digest_code()))
    return blake2b(whole, digest_size=_DIGEST_BYTES).hexdigest()


@functools.cache
def digest_code() -> str:
    """Return what changes with the code of this program: the files of its packages, as large and as old as they are,
    and the interpreter."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    digest.update(f"{sys.version}\n{sys.executable}\n".encode())
    for package in _PACKAGES:
        for directory, _, names in sorted(os.walk(_ROOT / package)):
            for name in sorted(names):
                if name.endswith((".py", ".so")):
                    facts = os.stat(os.path.join(directory, name))
                    digest.update(f"{directory}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
