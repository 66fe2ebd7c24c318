"""What targets and drafts write alike: hosts, number formats, cores, layers on a device, static shapes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.config.section import Section

THIS_NODE = "here"
"""The daemon's own host, where a host is named."""
# Of one target on hand-written places; numbers from 64 on are standbys (control.replicas.standbys).
MAX_REPLICAS = 64

WeightsPrecision = Literal["auto", "as_file", "fast", "int4", "int8", "fp8", "bf16", "fp16", "fp32"]
DraftWeightsPrecision = Literal["auto", "draft", "as_file", "fast", "int4", "int8", "fp8", "bf16", "fp16", "fp32"]
ActivationPrecision = Literal["auto", "bf16", "fp16", "fp32"]
KvCachePrecision = Literal["auto", "16bit", "8bit"]

DeviceLayers = Literal["all"] | Annotated[int, Field(ge=0, le=10_000)]
"""How many of a model's layers its device holds at most."""

Cores = Annotated[list[Annotated[int, Field(ge=0, le=4095)]], Field(max_length=1024)]


class StaticShapesSection(Section):
    """How a model runs where shapes are static."""

    static_shapes: Literal["auto", "on"] = "auto"
    """Graphs of fixed shape, one sequence a forward (`openvino_rt`): `auto` where the device takes nothing else
    (`NPU`), `on` also where it does not need them."""
    static_context_tokens: int = Field(default=0, ge=0, le=131_072)
    """With static shapes: the longest sequence, prompt and output, in tokens. Every forward attends over so many. 0:
    what the model and the KV cache hold, at most 2048."""
    static_prefill_rows: int = Field(default=128, ge=1, le=4096)
    """With static shapes: the rows of a forward of a prompt; a graph is compiled for them."""
    static_verify_rows: list[Annotated[int, Field(ge=1, le=256)]] = Field(default=[1, 4, 8], min_length=1, max_length=8)
    """With static shapes: the rows of forwards that decode or verify, the draft's among them; a graph is compiled for
    each."""
