"""A shared library with the functions and structures of mainline llama.cpp, which loads no models. cc makes it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from adapters.llama_cpp.mainline import _MORE
from adapters.llama_cpp.native import Structures, _list_calls

COMPILER = shutil.which("cc")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

_SOURCE = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
struct model_options {
    void *devices, *overrides;
    int32_t n_gpu_layers;
    int split_mode, load_mode%(lazy)s;
    int32_t main_gpu;
    void *tensor_split, *progress, *progress_data, *kv_overrides;
    bool vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp;
};
struct context_options {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq;
    int32_t n_threads, n_threads_batch;
    int ctx_type, rope, pooling, attention, flash;
    float rope_base, rope_scale, yarn_ext, yarn_attn, yarn_fast, yarn_slow;
    uint32_t yarn_orig;
    float defrag;
    void *cb_eval, *cb_eval_data;
    int type_k, type_v;
    void *abort, *abort_data;
    %(more)s
    bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
    void *samplers;
    size_t n_samplers;
    void *other;
};
struct model_options llama_model_default_params(void) {
    struct model_options found = {.n_gpu_layers = -1, .split_mode = 1, .load_mode = -1, .use_extra_bufts = true};
    %(set_lazy)s
    return found;
}
int32_t seen_layers = -9;
void *llama_model_load_from_file(const char *path, struct model_options options) {
    seen_layers = options.n_gpu_layers;
    return 0;
}
struct context_options llama_context_default_params(void) {
    struct context_options found = {
        .n_ctx = 512, .n_batch = 2048, .n_ubatch = 512, .n_seq_max = 1, .n_outputs_max_per_seq = 1, .n_threads = 4,
        .n_threads_batch = 4, .rope = -1, .pooling = -1, .attention = -1, .flash = -1, .yarn_ext = -1, .yarn_attn = -1,
        .yarn_fast = -1, .yarn_slow = -1, .defrag = -1, .type_k = 1, .type_v = 1, .offload_kqv = true, .no_perf = true,
        .op_offload = true, .swa_full = true};
    return found;
}
static const char *names[] = {"CPU", "BLAS", "Vulkan0", "Vulkan1"};
static const char *descriptions[] = {"a processor", "a library of products", "a GPU", "a GPU in the processor"};
static const int kinds[] = {0, 3, 1, 2};
size_t ggml_backend_dev_count(void) { return 4; }
void *ggml_backend_dev_get(size_t place) { return (void *)(place + 1); }
const char *ggml_backend_dev_name(void *device) { return names[(size_t)device - 1]; }
const char *ggml_backend_dev_description(void *device) { return descriptions[(size_t)device - 1]; }
int ggml_backend_dev_type(void *device) { return kinds[(size_t)device - 1]; }
void ggml_backend_dev_memory(void *device, size_t *free, size_t *total) { *free = 3 << 20; *total = 4 << 20; }
"""


def build_stub(file: Path, *, more: str = "", without: str = "", lazy: bool = True) -> Path:
    """Build the library. `more`: fields in front of a context's flags, in C; `without`: a function that it lacks;
    `lazy`: whether a model's options have a mode for that."""
    fields = {"lazy": ", lazy_mode" if lazy else "", "set_lazy": "found.lazy_mode = 1;" if lazy else ""}
    source = _SOURCE % {"more": more, **fields}
    empty = [
        name
        for name in (_list_calls(Structures(*3 * [ctypes.Structure])) | _MORE)
        if f"{name}(" not in source and name != without
    ]
    source += "".join(f"void *{name}(void) {{ return 0; }}\n" for name in empty)
    written = file.with_suffix(".c")
    written.write_text(source)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(file), str(written)], check=True)
    return file
