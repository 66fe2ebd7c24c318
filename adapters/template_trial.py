"""Whether a model's chat template is of use for chats, found before the model is loaded.

It is tried in a process of its own: a template is a program from outside, and may go on for ever.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from adapters.chat_template import ChatTemplate
from adapters.gguf_header import read_header
from adapters.tokenizer_gguf import read_template as read_gguf_template
from adapters.tokenizer_hf import read_template as read_hf_template
from device_profiles.units import GIB

LONGEST_S = 5.0
LARGEST_BYTES = 2 * GIB


def find_template_fault(model: Path, file_bytes: int | None = None) -> str:
    """Return why the template of a GGUF file or a model directory is of no use for a plain chat; "" where it is, or
    where there is none. `file_bytes` of a file of which `model` is the first part. Raises ModelRefused."""
    template = read_hf_template(model) if model.is_dir() else read_gguf_template(read_header(model, file_bytes))
    return "" if template is None else _try(template)


def _try(template: ChatTemplate) -> str:
    asked = json.dumps(template.as_arguments())
    command = [sys.executable, "-P", "-m", "adapters.template_trial"]  # -P: whatever lies in this directory
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=LONGEST_S, check=False, env=known
        )
    except subprocess.TimeoutExpired:
        return f"the model's chat template takes longer than {LONGEST_S:g} s"
    if done.returncode:
        return "the model's chat template ends the process that runs it"
    fault: str = json.loads(done.stdout)
    return fault


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_BYTES, LARGEST_BYTES))
    template = ChatTemplate(**json.load(sys.stdin))
    sys.stdout.write(json.dumps(template.find_fault()))


if __name__ == "__main__":
    _main()
