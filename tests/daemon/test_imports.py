"""The daemon holds no model, and starting it or a command loads no framework that it does not need."""

import subprocess
import sys

import pytest

FRAMEWORKS = ("openvino", "openvino_genai", "ik_llama_cpp", "onnxruntime", "torch", "transformers", "ray")


@pytest.mark.parametrize("module", ["orchestrator.daemon.run", "orchestrator.cli.main", "adapters.registry"])
def test_no_framework_is_imported(module):
    code = f"import sys, {module}; print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_loads_only_what_it_needs():
    heavy = ("pydantic", "fastapi", "numpy", "httpx", "orchestrator.daemon.bootstrap", "orchestrator.config.model")
    imported = "sys, orchestrator.cli.main, orchestrator.cli.status"
    code = f"import {imported}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_loads_no_configuration():
    heavy = ("pydantic", "fastapi", "httpx", "yaml", "orchestrator.config.model")
    imported = (
        "sys, orchestrator.worker.host, orchestrator.worker.loading.engine, orchestrator.worker.loading.draft_worker"
    )
    code = f"import {imported}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_openvino_adapter_is_loaded_without_openvino():
    code = (
        "import sys; from adapters import registry; registry.get('openvino_rt').recipe(); "
        "print('openvino' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
