"""The engines that a comparison knows, with their modes. Nothing is imported here: each is loaded where it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine: its module's `load`, and its modes, the plain one first. `needs_draft`: modes for a draft model.
    `serves`: it is a server that its module starts."""

    name: str
    entry: str
    modes: tuple[str, ...]
    needs_draft: tuple[str, ...] = ()
    serves: bool = False


PEERS = (
    Peer(
        "openvino_genai",
        "outrider_lab.peers.ov_genai:load",
        ("plain", "lookup", "batching", "speculative"),
        ("speculative",),
    ),
    Peer("onnxruntime_genai", "outrider_lab.peers.ort_genai:load", ("plain",)),
    Peer(
        "llama.cpp",
        "outrider_lab.peers.llama_server:load",
        ("plain", "lookup", "speculative"),
        ("speculative",),
        serves=True,
    ),
)
