"""What is wrong with the chat templates of a cluster.yaml's targets, as far as their files are at hand."""

from __future__ import annotations

from pathlib import Path

from adapters.contract import ModelRefused
from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import resolve
from adapters.template_trial import find_template_fault
from adapters.vocabulary import SIMULATED_PREFIX
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Lines, describe_place


def list_template_faults(config: ClusterConfig, path: Path, lines: Lines) -> list[str]:
    """Return a line for each target whose chat template is of no use for a plain chat. It can be served, and answers
    completions. Models of a hub are not looked at: nothing is downloaded."""
    faults = []
    for target in config.targets:
        source = target.model.source
        if source.startswith((SIMULATED_PREFIX, HUB_PREFIX)):
            continue
        try:
            file = resolve(source, path.resolve().parent, lambda _stage, _fraction: None)
            whole = sum(part.stat().st_size for part in file.content) if file.parts else None
            fault = find_template_fault(file.path, whole)
        except (ModelRefused, OSError):
            continue  # told by those who check models
        if fault:
            where = describe_place(path, lines, target.find_place("model", "source"))
            faults.append(f"{where} chats with it will be refused, completions not: {fault}")
    return faults
