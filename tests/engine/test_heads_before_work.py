"""What a file's head says is refused before the work: nothing is prepared, and no worker tries again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters.contract import ModelRefused, silent
from orchestrator.worker.loading.prepared import prepare_model
from tests.support.options import build_options
from tests.support.tiny_gguf import Tiny, write

BYTE_LEVEL = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "cut-of-tomorrow"}


@pytest.mark.parametrize(
    ("metadata", "extra", "named"),
    [
        (BYTE_LEVEL, {}, r"tokenizer\.ggml\.pre"),
        (BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2"}, {}, r"tokenizer\.ggml\.merges"),
        ({}, {"rope_freqs.weight": np.ones(5, np.float32)}, r"rope_freqs\.weight"),
        ({}, {"blk.1.attn_v.weight": None}, r"blk\.1\.attn_v\.weight"),
        ({"logit_scale": 0.5}, {}, r"llama\.logit_scale"),
    ],
)
@pytest.mark.parametrize("adapter", ["openvino_rt", "onnx_rt", "torch_device"])
def test_nothing_is_prepared_of_a_file_that_cannot_serve(tmp_path: Path, metadata, extra, named, adapter) -> None:
    write(tmp_path / "m.gguf", Tiny("llama"), metadata, extra)
    options = build_options(tmp_path, "m.gguf", adapter, exactness="bit", threads=0)
    with pytest.raises(ModelRefused, match=rf"m\.gguf: .*{named}"):
        prepare_model(options, silent)
    assert not [path for path in tmp_path.glob("store/**/*") if path.suffix in (".xml", ".onnx", ".safetensors")]
