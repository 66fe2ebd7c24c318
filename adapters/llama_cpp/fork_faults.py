"""What ik_llama.cpp computes otherwise than llama.cpp, does not load, or ends the process over.

Architectures were found by comparing the logits of tiny files (tests/support/tiny_llama_files.py) in ik_llama.cpp of
ik-llama-cpp-python 0.1.5 and in llama.cpp of xllamacpp 2026.10.11549. Sound ones differ by rounding, under 1 % of the
logits' deviation. Names of `tokenizer.ggml.pre` were found by loading vocabularies in both.
"""

from __future__ import annotations

import re
from typing import Final

from adapters.decoder.gguf_keys import read_count
from adapters.gguf_facts import read_facts
from adapters.gguf_header import GgufHeader

UNKNOWN_CUTS: Final = (
    *("cohere2moe", "glm5", "granite-embed-multi-97m", "hy_v4", "k2-horizon", "laguna", "mellum2", "minicpm5"),
    *("spark2_5", "talkie", "ufakzeka"),
)
"""Names of `tokenizer.ggml.pre` that it does not load, and llama.cpp does."""
NO_LORAS: Final = "applies no LoRA adapters beside flash attention"
"""What it does with any file that has adapters (`llama_lora_adapter_set` returns -1)."""
_RESIDUAL: Final = "loses what runs past the layers of {}"
_FAULTS: Final = {
    **dict.fromkeys(("llama4", "granite", "granitemoe"), _RESIDUAL),
    **dict.fromkeys(("hunyuan-moe", "qwen2vl"), "gives other logits for {}"),
    "minicpm": "scales the logits of {} otherwise",
    "starcoder2": "ends the process over {} (GGML_ASSERT)",
}
_RECURRENT: Final = frozenset({"qwen35", "qwen3next"})
"""Architectures with a recurrent state that it computes as llama.cpp does. It ends the process over mamba and over
qwen35moe, and knows few others."""
_PASSED_OVER: Final = re.compile(r"^rope_(freqs|factors)")
"""Tensors that it reads and does not compute with on a processor: Llama 3's and Phi 3's ropes."""


def find_fault(header: GgufHeader) -> str:
    """Return what the library does with a file that is not what llama.cpp does, "" where nothing is known. Raises
    ModelRefused as `read_facts`."""
    family = header.text("general.architecture") or ""
    if family not in _RECURRENT and not read_facts(header).cuts_anywhere:
        return f"is not known to run the recurrent state of {family}"
    if family == "llama" and read_count(header, "llama.expert_count", 0, least=0):
        return _RESIDUAL.format("llama with experts")
    if fault := _FAULTS.get(family):
        return fault.format(family)
    passed_over = next((tensor.name for tensor in header.tensors if _PASSED_OVER.search(tensor.name)), "")
    if passed_over:
        return f"passes over {passed_over}"
    cut = header.text("tokenizer.ggml.pre") or ""
    return f"does not know the tokenizer's {cut!r} (tokenizer.ggml.pre)" if cut in UNKNOWN_CUTS else ""
