"""How much memory a model will take on a device, told before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Final


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """What a runtime keeps beside the prepared file, as measured on it (docs/adr/0020-precision-per-device.md).

    `fixed_bytes`: its libraries and graph; `layer_bytes`: the graph's part for each layer. `weights_copies`: how often
    the prepared weights of layers and head are in memory at the peak (mapped, read, packed for its kernels).
    `layers_copies_16bit`: how often those of layers are besides, where activations have 16 bits: they are packed again
    for forwards of few rows. `embedding_copies`: how often an embedding is that is not the head too. `logits_copies`:
    copies of float32 logits at the peak. `scores_rows`: rows whose float32 scores of attention are there at the peak,
    whatever a forward has. `mlp_floats` and `hidden_floats`: float32 values of a row's activations, as multiples of
    those sizes. `slot_logits_rows`: rows of float32 logits that each sequence has buffers for; `slot_bytes`: what it
    has of them whatever the model is. `graph_copies`: how often the weights that a graph of fixed shape is made from
    are in memory for it. `graph_cache_copies`: the same of the keys and values that it is given. `tied_copies`: how
    often a head is besides that is the embedding, too. `rank_bytes`: what the process of each further rank of tensor
    parallelism holds beside its part. `kv_at_once`: all of the KV cache is in memory as soon as it is loaded, not as
    far as it was used. `width_bytes`: what is kept for forwards of one number of rows.
    """

    fixed_bytes: int
    weights_copies: float
    embedding_copies: float
    logits_copies: float
    mlp_floats: float
    hidden_floats: float
    layer_bytes: int = 0
    layers_copies_16bit: float = 0.0
    scores_rows: int = 0
    slot_logits_rows: int = 0
    slot_bytes: int = 0
    graph_copies: float = 0.0
    graph_cache_copies: float = 0.0
    tied_copies: float = 0.0
    rank_bytes: int = 0
    kv_at_once: bool = False
    width_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What a runtime keeps that leaves some layers in the host's memory where the device has no room for them.

    `host_bytes` and `device_bytes`: beside all that depends on the model. Each sequence has buffers of its own for
    forwards of `slot_rows` rows: `mlp_floats` and `hidden_floats` as in `MemoryCosts`, and float32 logits where the
    output head is; the host has these logits once more. A sequence holds up to `slot_positions` of the KV cache beside
    those that it uses, and all together `kv_copies` times the cache.
    """

    host_bytes: int
    device_bytes: int
    slot_rows: int
    slot_positions: int
    kv_copies: float
    mlp_floats: float
    hidden_floats: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that memory depends on. `vocabulary` (0: no logits), `hidden` and `mlp` are in elements, `heads` and
    `layers` numbers, `context_tokens` the longest sequence that there is room for. `layers_bytes`, `head_bytes` and
    `embedding_bytes` (0 where it is the head, too) are the prepared file's; `graph_weights_bytes` and
    `graph_caches_bytes` are sums over its graphs of fixed shape: see `MemoryCosts`."""

    vocabulary: int
    hidden: int
    mlp: int
    heads: int
    context_tokens: int
    layers: int
    layers_bytes: int
    head_bytes: int
    embedding_bytes: int
    graph_weights_bytes: int = 0
    graph_caches_bytes: int = 0


KV_CACHE: Final = "kv_cache"
ANNOUNCED_WIDTHS: Final = 32
"""Numbers of rows of forwards whose kernels are announced: those of decoding, and some prompts'. A worker that met more
corrects the next plan. ADR 0157."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a worker process holds at its peak.

    - Those that it holds before it loads.
    - The model's weights with all that the runtime makes of them.
    - The whole KV pool.
    - The workspace of the largest forward.
    - What an earlier load held more, or less where it is below 0, than was announced of it (`correct_plan`).
    """

    process: int
    weights: int
    kv_cache: int
    workspace: int
    correction: int = 0
    PARTS: ClassVar[tuple[str, ...]] = ("process", "weights", KV_CACHE, "workspace", "correction")

    @property
    def parts(self) -> dict[str, int]:
        return {part: getattr(self, part) for part in self.PARTS}

    @property
    def total(self) -> int:
        return self.process + self.weights + self.kv_cache + self.workspace + self.correction


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a worker has done of what was announced: its forwards had at most `batch_rows` rows, the logits of
    `logits_rows` of them were wanted, `slots` sequences ran at a time, and `kv_cache_bytes` of its KV cache were used.
    `widths`: how many numbers of rows they had.
    """

    batch_rows: int = 0
    logits_rows: int = 0
    kv_cache_bytes: int = 0
    slots: int = 0
    widths: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What a worker held that loaded a model so, in bytes (docs/adr/0148-memory-by-the-last-load.md).

    The fields up to `slots` are what it is known by: `fingerprint` is of hardware and runtime, `weights` the recipe of
    the prepared weights, `wanted` the operator's options. `format`: of the weights, as profiles have it. `held_bytes`
    is the most that it held, and `announced_bytes` what is announced of a worker that uses as much as it did. `whole`
    is what was announced of it at its fullest, by part, without a correction. `layers`: how many of the model's it had,
    where others had the rest; 0: all. Which ones stands in `weights` then.
    """

    fingerprint: str
    adapter: str
    device: str
    model: str
    model_digest: str
    weights: str
    wanted: str
    slots: int
    format: str = ""
    held_bytes: int = 0
    announced_bytes: int = 0
    whole: dict[str, int] = field(default_factory=dict)
    measured_at: str = ""
    layers: int = 0

    @property
    def surplus_bytes(self) -> int:
        """What it held more than was announced; below 0 where it held less."""
        return self.held_bytes - self.announced_bytes

    def says_more_than(self, other: MeasuredMemory) -> bool:
        """Return whether this is to be kept in place of the other: it was used as fully, or held more."""
        return self.announced_bytes >= other.announced_bytes or self.surplus_bytes > other.surplus_bytes


def correct_plan(plan: MemoryPlan, measured: MeasuredMemory | None) -> MemoryPlan:
    """Return a plan by what the last load of the same held. Its process had what it had: what is imported before a load
    and what later differs from one to the next."""
    if measured is None:
        return plan
    return replace(plan, correction=measured.surplus_bytes + measured.whole.get("process", 0) - plan.process)


def plan_memory(
    costs: MemoryCosts,
    model: ModelShape,
    *,
    kv_cache_bytes: int,
    batch_rows: int,
    logits_rows: int,
    process_bytes: int,
    slots: int = 0,
    widths: int = 0,
    activations_16bit: bool = False,
    ranks: int = 1,
) -> MemoryPlan:
    """Return what a worker will hold at most: every KV block used, and a forward of `batch_rows` rows. The logits of
    `logits_rows` of them are asked for. `process_bytes` is what it holds before loading. `slots`: sequences at a time.
    `widths`: how many numbers of rows forwards have. `activations_16bit`: they have 16 bits, not 32. `ranks`: processes
    that share the model's layers."""
    weights = costs.weights_copies * (model.layers_bytes + model.head_bytes)
    weights += costs.embedding_copies * model.embedding_bytes
    if not model.embedding_bytes:
        weights += costs.tied_copies * model.head_bytes
    if activations_16bit:
        weights += costs.layers_copies_16bit * model.layers_bytes
    fixed = costs.fixed_bytes + (ranks - 1) * costs.rank_bytes
    graphs = costs.graph_copies * model.graph_weights_bytes + costs.graph_cache_copies * model.graph_caches_bytes
    row = 4.0 * (costs.mlp_floats * model.mlp + costs.hidden_floats * model.hidden)
    rows = costs.logits_copies * min(logits_rows, batch_rows) + costs.slot_logits_rows * slots
    logits = 4.0 * model.vocabulary * rows
    return MemoryPlan(
        process=process_bytes,
        weights=int(fixed + costs.layer_bytes * model.layers + weights + graphs),
        kv_cache=kv_cache_bytes,
        workspace=int(row * batch_rows + logits)
        + costs.slot_bytes * slots
        + costs.width_bytes * min(widths, ANNOUNCED_WIDTHS)
        + 4 * costs.scores_rows * model.heads * model.context_tokens,
    )
