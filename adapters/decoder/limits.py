"""What a runtime cannot load: forms of models that it does not read, and shapes that its graph has no operation for.

Builders ask before they build, and checks before anything is prepared or downloaded.
"""

from __future__ import annotations

from collections.abc import Callable

from adapters.contract import ModelRefused
from adapters.decoder.spec import DecoderSpec
from adapters.ir_facts import IrFacts
from adapters.names import GGUF_ADAPTERS, OPENVINO_LLAMA, OWN_ADAPTERS


def refuse_decoder(adapter: str, spec: DecoderSpec, *, static: bool = False) -> None:
    """Refuse a model that an adapter's graph cannot express; `static`: its graph of fixed shapes. Raises
    ModelRefused, which names the fact and the way out. What is not known of an adapter is not refused."""
    find = _LIMITS.get((adapter, static))
    if find is not None and (why := find(spec)):
        raise ModelRefused(why)


def explain_no_graph(facts: IrFacts, adapter: str, *, static: bool = False) -> str:
    """Return why an adapter of ours (or "auto") does not run a directory that brings its own graph, with the way out;
    "" where it does."""
    if adapter in OWN_ADAPTERS and adapter != facts.adapter:
        return f"it is in {facts.form}, and {adapter} does not read that. Set adapter: {facts.adapter}."
    if static:
        return (
            f"it is in {facts.form}, which runs with open shapes alone. Set device: CPU or GPU, or take the "
            "model's GGUF file or safetensors."
        )
    return ""


def refuse_directory(adapter: str, name: str) -> None:
    """Refuse a directory, or a model of the hub that is one, on an adapter that reads GGUF files alone. Raises
    ModelRefused, which names the way out."""
    if adapter in GGUF_ADAPTERS:
        raise ModelRefused(
            f"{name} is no GGUF file, and {adapter} reads nothing else. Name one (hf:ORG/NAME/FILE.gguf, where the hub "
            "has it), make one with llama.cpp's convert_hf_to_gguf.py, or choose adapter: openvino_rt, onnx_rt or "
            "torch_device."
        )


def _find_for_openvino(spec: DecoderSpec) -> str:
    if not spec.attention_softcap:
        return ""
    return (
        f"the model caps attention scores softly (attn_logit_softcapping {spec.attention_softcap:g}), "
        "and OpenVINO's paged attention has no such step. Choose a model without it (Gemma 3 has none)."
    )


def _find_for_onnx(spec: DecoderSpec) -> str:
    reasons = {
        "soft-capped attention (attn_logit_softcapping)": spec.attention_softcap > 0,
        "soft-capped logits (final_logit_softcapping)": spec.logit_softcap > 0,
        f"heads of {spec.head_dim} (head_dim: a multiple of 16 is needed)": spec.head_dim % 16 != 0,
    }
    names = [reason for reason, present in reasons.items() if present]
    return f"{spec.family} with {', '.join(names)} is not supported on ONNX Runtime" if names else ""


def _find_for_torch(spec: DecoderSpec) -> str:
    if len(set(spec.ropes)) > 1 and spec.family != "gemma3":
        return f"{spec.family} with ropes that differ by layer (rope_parameters) is not supported on torch"
    return ""


_LIMITS: dict[tuple[str, bool], Callable[[DecoderSpec], str]] = {
    ("openvino_rt", False): _find_for_openvino,
    (OPENVINO_LLAMA, False): _find_for_openvino,
    ("onnx_rt", False): _find_for_onnx,
    ("torch_device", False): _find_for_torch,
}
