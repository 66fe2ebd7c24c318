"""What is wrong with the chat templates of a cluster.yaml's targets, as far as their files are at hand."""

from __future__ import annotations

from pathlib import Path

from adapters.chat_template import ChatTemplate, TemplateEnded
from adapters.contract import ModelRefused
from adapters.gguf_header import read_header
from adapters.hf_hub import HUB_PREFIX, DownloadFailed, find_head, parse_id
from adapters.model_source import resolve
from adapters.tokenizer_gguf import read_template as read_gguf_template
from adapters.tokenizer_hf import read_template as read_hf_template
from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, describe_place
from orchestrator.daemon.sandbox.sandbox import Sandbox, SandboxedTemplate
from orchestrator.errors import RequestError

# Of a template that loops (ADR 0099). Not tuned: usual ones take milliseconds.
_TIMEOUT_S = 5.0


def list_template_faults(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line for each target whose chat template is of no use for a plain chat. It can be served, and answers
    completions. Of a model of a hub no weights are downloaded, and it is left out where the hub cannot be reached."""
    faults = []
    for target in config.targets:
        source = target.model.source
        if source.startswith(SIMULATED_PREFIX):
            continue
        where = describe_place(path, lines, target.find_place("model", "source"))
        try:
            fault = _find_fault(_read_template_of(source, path.resolve().parent))
        except (ModelRefused, DownloadFailed, OSError):
            continue  # told by those who check models, and by the load
        except RequestError as error:
            faults.append(f"{where} its chat template could not be tried: {error}")
            continue
        if fault:
            faults.append(f"{where} chats with it will be refused, completions not: {fault}")
    return faults


def _read_template_of(source: str, base: Path) -> ChatTemplate | None:
    """Return the template of what an operator wrote, by heads and small files of a hub."""
    if not source.startswith(HUB_PREFIX):
        file = resolve(source, base)
        return _read_template(file.path, file.whole_bytes)
    path, header = find_head(parse_id(source))
    return _read_template(path) if header is None else read_gguf_template(header)


def _read_template(model: Path, file_bytes: int | None = None) -> ChatTemplate | None:
    return read_hf_template(model) if model.is_dir() else read_gguf_template(read_header(model, file_bytes))


def _find_fault(template: ChatTemplate | None) -> str:
    if template is None:
        return ""
    sandbox = Sandbox(_TIMEOUT_S)
    try:
        return SandboxedTemplate(template, sandbox).find_fault()
    except TemplateEnded as end:
        return str(end)
    finally:
        sandbox.close()
