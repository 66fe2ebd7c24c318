"""A short text by transformers' own attention and cache: what a decoder over our pages has to be near to, to be sane.

`python -m adapters.torch_device.short_text PREPARED TARGET` writes it, as `adapters.decoder.short_text` does of models
that are built in.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from adapters.contract import DeviceLost, ModelRefused
from adapters.decoder.short_text import ShortText, log_softmax, run_command, save_short_text, seed_tokens
from adapters.prepared_facts import read_facts
from adapters.torch_device.adapter import import_torch
from adapters.torch_device.any_decoder import load_network


def write_short_text(prepared: Path, target: Path) -> None:
    """Let a prepared model say its text in float32, and write it. Raises ModelRefused, OSError."""
    import_torch()
    network = load_network(prepared, torch.float32, torch.device("cpu"), "eager")
    tokens, count = seed_tokens(read_facts(prepared)["vocabulary_size"])
    with torch.inference_mode():
        answer = network.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    rows = log_softmax(np.concatenate([row.float().numpy() for row in answer.logits]))
    text = answer.sequences[0].tolist()
    new = text[len(tokens) :]
    scores = [float(row[token]) for row, token in zip(rows, new, strict=True)]
    save_short_text(ShortText(text, len(tokens), scores), target)


if __name__ == "__main__":
    sys.exit(run_command(write_short_text, (ModelRefused, DeviceLost, OSError, MemoryError, RuntimeError)))
