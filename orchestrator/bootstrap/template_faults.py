"""What is wrong with the chat templates of a cluster.yaml's targets, as far as their files are at hand."""

from __future__ import annotations

from pathlib import Path

from adapters.chat_template import TemplateEnded
from adapters.contract import ModelRefused
from adapters.gguf_header import read_header
from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import resolve
from adapters.tokenizer_gguf import read_template as read_gguf_template
from adapters.tokenizer_hf import read_template as read_hf_template
from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, describe_place
from orchestrator.errors import RequestError
from orchestrator.sandbox.sandbox import Sandbox
from orchestrator.sandbox.templates import SandboxedTemplate

_TIMEOUT_S = 5.0


def list_template_faults(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line for each target whose chat template is of no use for a plain chat. It can be served, and answers
    completions. Models of a hub are not looked at: nothing is downloaded."""
    faults = []
    for target in config.targets:
        source = target.model.source
        if source.startswith((SIMULATED_PREFIX, HUB_PREFIX)):
            continue
        where = describe_place(path, lines, target.find_place("model", "source"))
        try:
            file = resolve(source, path.resolve().parent, lambda _stage, _fraction: None)
            whole = sum(part.stat().st_size for part in file.content) if file.parts else None
            fault = find_template_fault(file.path, whole)
        except (ModelRefused, OSError):
            continue  # told by those who check models
        except RequestError as error:
            faults.append(f"{where} its chat template could not be tried: {error}")
            continue
        if fault:
            faults.append(f"{where} chats with it will be refused, completions not: {fault}")
    return faults


def find_template_fault(model: Path, file_bytes: int | None = None, timeout_s: float = _TIMEOUT_S) -> str:
    """Return why the template of a GGUF file or a model directory is of no use for a plain chat; "" where it is, or
    where there is none. `file_bytes` of a file of which `model` is the first part. Raises ModelRefused, and
    RequestError where it cannot be tried."""
    template = read_hf_template(model) if model.is_dir() else read_gguf_template(read_header(model, file_bytes))
    if template is None:
        return ""
    sandbox = Sandbox(timeout_s)
    try:
        return SandboxedTemplate(template, sandbox).find_fault()
    except TemplateEnded as end:
        return str(end)
    finally:
        sandbox.close()
