"""Adapters of other distributions: a small real one that pip builds and installs, and ones that are broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ADAPTER = '''
"""An accelerator that is the simulated one under another name."""

import os
from dataclasses import replace

import numpy as np

from adapters.contract import AdapterUnavailable, ForwardResult, Unsupported
from adapters.simulated.adapter import SimulatedAdapter


class TinyModel:
    def __init__(self, model, device):
        self._model = model
        self.capabilities = replace(model.capabilities, device=device)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch):
        found = self._model.forward(batch)
        if os.environ.get("TINY_FAULT") == "rows":  # the last bits depend on how many rows stand in the batch
            rows = sum(len(segment.tokens) for segment in batch)
            return ForwardResult(found.logits + np.float32(1e-3 * (rows % 3)), found.device_ms)
        return found


class TinyAdapter:
    name = "tiny"

    def __init__(self):
        self._simulated = SimulatedAdapter()

    def devices(self):
        if os.environ.get("TINY_FAULT") == "devices":
            raise RuntimeError("the tiny driver is not there")
        (device,) = self._simulated.devices()
        return [replace(device, adapter=self.name, name="TINY", kind="npu", full_name="tiny accelerator")]

    def classes(self, options):
        return self._simulated.classes(options)

    def recipe(self, weights=None):
        return "tiny 1; " + self._simulated.recipe(weights)

    def prepare(self, source, target, progress, weights=None):
        self._simulated.prepare(source, target, progress, weights)

    def load(self, prepared, options, progress):
        if os.environ.get("TINY_FAULT") == "load":
            raise AdapterUnavailable("tiny-driver is not installed: pip install tiny-driver")
        if os.environ.get("TINY_FAULT") == "refuses":
            raise Unsupported("tiny: the model is too wide for it")
        if options.device != "TINY":
            raise Unsupported(f"tiny: there is no device {options.device!r}; there is TINY")
        return TinyModel(self._simulated.load(prepared, replace(options, device="SIM"), progress), "TINY")
'''
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "tiny-accelerator"
version = "1.2.3"
[project.entry-points."outrider.adapters"]
tiny = "tiny_accelerator.adapter:TinyAdapter"
[tool.setuptools]
packages = ["tiny_accelerator"]
"""
SUITE = """
import pytest
from adapters.conformance import Case
from adapters.conformance.suite import *


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    source = tmp_path_factory.mktemp("source") / "script.txt"
    source.write_text("")
    return Case("tiny", "TINY", source, damaged=b"fault=nothing-like-that", damage_told="nothing-like-that")
"""


def install_tiny_adapter(root: Path) -> Path:
    """Build the distribution and install it; returns the directory that belongs on PYTHONPATH."""
    source, target = root / "tiny-accelerator", root / "site"
    package = source / "tiny_accelerator"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "adapter.py").write_text(ADAPTER, encoding="utf-8")
    (source / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    offline = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def write_distribution(
    site: Path, distribution: str, module: str, code: str, *, group: str = "outrider.adapters", **entries: str
) -> None:
    """Write what pip leaves of a distribution of one module: the module and its metadata."""
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(code, encoding="utf-8")
    metadata = site / f"{distribution.replace('-', '_')}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n", encoding="utf-8")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(lines) + "\n", encoding="utf-8")
