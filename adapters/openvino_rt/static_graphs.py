"""Graphs of fixed shape, compiled for a device: a body for each width, a head for each number of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import LoadOptions, ModelRefused, Precision, RuntimeFailed, Unsupported
from adapters.kv_memory import block_tokens
from adapters.openvino_rt.failures import FAILURES, classify_openvino_failure
from adapters.openvino_rt.static_build import BODY_FILE, EMBEDDING_FILE, HEAD_FILE, PLAN_FILE
from device_profiles.units import ceil_div, human_bytes

USUAL_CONTEXT_TOKENS = 2048
"""Positions of a sequence where none are asked for: attention runs over all of them in every forward."""
_UNSEEN = -30000.0  # far below any score, and 16 bits still hold it when a score is added


@dataclass(frozen=True, slots=True)
class StaticKvShape:
    """What lies outside the graphs: `layers` keys and values of (kv_heads, capacity, head_dim) for each sequence, in
    `blocks` blocks of `block` positions for all of them."""

    layers: int
    kv_heads: int
    head_dim: int
    precision: Precision
    capacity: int
    block: int
    blocks: int

    @property
    def caches(self) -> int:
        return 2 * self.layers

    @property
    def bytes_per_token(self) -> int:
        return self.caches * self.kv_heads * self.head_dim * np.dtype(self.kind).itemsize

    @property
    def kind(self) -> type[np.generic]:
        return choose_numpy_type(self.precision)


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """`context_tokens`: positions of a sequence at most. The widths are numbers of rows, in ascending order."""

    context_tokens: int
    prefill_rows: int
    verify_rows: tuple[int, ...]
    cache: StaticKvShape

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({*self.verify_rows, self.prefill_rows}))


def choose_numpy_type(precision: Precision) -> type[np.generic]:
    """Return the numpy type that holds an element; bfloat16 is held as its bits."""
    kinds: dict[Precision, type[np.generic]] = {Precision.BF16: np.uint16, Precision.FP16: np.float16}
    return kinds.get(precision, np.float32)


def plan_shapes(options: LoadOptions, facts: Mapping[str, Any], precision: Precision) -> StaticPlan:
    """Plan for a model of which `facts` are known (prepared_facts.py). Raises Unsupported, with the way out, where the
    context that is asked for is longer than the model's or than the pool holds, or where widths make no sense."""
    static = options.static
    if static.prefill_rows < 1 or not static.verify_rows or min(static.verify_rows) < 1:
        raise Unsupported("static shapes need prefill_rows of at least 1, and verify_rows of at least one such number")
    layers, kv_heads, head_dim = (int(facts[key]) for key in ("layers", "kv_heads", "head_dim"))
    item = np.dtype(choose_numpy_type(precision)).itemsize
    position_bytes = 2 * layers * kv_heads * head_dim * item
    longest = static.context_tokens or min(USUAL_CONTEXT_TOKENS, int(facts["context_length"]))
    useful_bytes = min(options.kv_cache_bytes, options.slots * longest * position_bytes)
    block = block_tokens(head_dim * item, useful_bytes)
    blocks = min(options.kv_cache_bytes // (block * position_bytes), options.slots * ceil_div(longest, block))
    if not blocks:
        raise Unsupported(
            f"a KV cache of {human_bytes(options.kv_cache_bytes)} holds no block of {block} positions; "
            f"give limits.kv_cache at least {human_bytes(block * position_bytes)}"
        )
    context = _context(static.context_tokens, int(facts["context_length"]), blocks * block, position_bytes)
    cache = StaticKvShape(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        precision=precision,
        capacity=ceil_div(context + 1, block) * block,  # one position more, for padding to be written to
        block=block,
        blocks=blocks,
    )
    verify = tuple(sorted({min(rows, context) for rows in static.verify_rows}))
    return StaticPlan(context, min(static.prefill_rows, context), verify, cache)


def _context(wanted: int, model_tokens: int, room_tokens: int, position_bytes: int) -> int:
    if not wanted:
        return min(USUAL_CONTEXT_TOKENS, model_tokens, room_tokens)
    if wanted > model_tokens:
        raise Unsupported(f"static context_tokens {wanted} is more than the model's context of {model_tokens}")
    if wanted > room_tokens:
        raise Unsupported(
            f"static context_tokens {wanted} is more than the {room_tokens} positions that the KV cache holds; "
            f"give limits.kv_cache at least {human_bytes(wanted * position_bytes)}, or lower it"
        )
    return wanted


class Positions:
    """The tables that stand for a row's position: masks, cosines and sines."""

    def __init__(self, plan: dict[str, Any], capacity: int) -> None:
        self._capacity = capacity
        places = np.arange(capacity, dtype=np.float64)[:, None]
        self._tables: dict[str, NDArray[np.float32]] = {}
        for index, (*frequencies, magnitude) in enumerate(plan["ropes"]):
            angles = np.tile(places * np.array(frequencies), 2)
            self._tables[f"cos.{index}"] = (np.cos(angles) * magnitude).astype(np.float32)
            self._tables[f"sin.{index}"] = (np.sin(angles) * magnitude).astype(np.float32)
        self._masks = [self._mask(window) for window in plan["windows"]]

    def _mask(self, window: int) -> NDArray[np.float32]:
        """Every row's mask as a view into one line of numbers: row i belongs to position capacity - 1 - i."""
        line = np.full(2 * self._capacity - 1, _UNSEEN, np.float32)
        line[self._capacity - (window or self._capacity) : self._capacity] = 0.0
        return np.lib.stride_tricks.sliding_window_view(line, self._capacity)

    def write(self, inputs: dict[str, NDArray[Any]], start: int, count: int) -> None:
        """Fill the first `count` rows of a body's inputs for the positions from `start` on."""
        last = self._capacity - start
        for index, mask in enumerate(self._masks):
            inputs[f"bias.{index}"][0, 0, :count] = mask[last - count : last][::-1]
        for name, table in self._tables.items():
            inputs[name][0, 0, :count] = table[start : start + count]
        inputs["places"][:count] = np.arange(start, start + count)
        inputs["places"][count:] = self._capacity - 1  # padding goes where no row ever looks


class BodyGraph:
    """The layers, over `width` rows of one sequence."""

    def __init__(self, compiled: Any, width: int, cache: StaticKvShape) -> None:
        import openvino as ov

        self._request = compiled.create_infer_request()
        self._cache = cache
        self._slot = -1
        self.inputs: dict[str, NDArray[Any]] = {}
        self._pasts: list[Any] = []
        for port in compiled.inputs:
            if port.any_name.startswith("past."):
                self._pasts.append(port)
                continue
            kind = np.int32 if port.any_name == "places" else np.float32
            self.inputs[port.any_name] = np.zeros(tuple(port.get_shape()), kind)
            self._request.set_tensor(port, ov.Tensor(self.inputs[port.any_name], shared_memory=True))
        present = (cache.caches, cache.kv_heads, width, cache.head_dim)
        self.present = np.zeros(present, cache.kind)
        self._request.set_tensor("present", _tensor(self.present, cache))
        rows = np.zeros(tuple(compiled.output("rows").get_shape()), np.float32)
        self._request.set_tensor("rows", ov.Tensor(rows, shared_memory=True))
        self._rows: NDArray[np.float32] = rows[0]

    def run(self, slot: int, caches: NDArray[Any]) -> NDArray[np.float32]:
        """Run over a slot's caches, (caches, kv_heads, capacity, head_dim). Returns the rows, (width, hidden), valid
        until the next run; `present` holds their keys and values. Raises RuntimeError, OpenVINO's own."""
        if slot != self._slot:
            for port, cache in zip(self._pasts, caches, strict=True):
                self._request.set_tensor(port, _tensor(cache[None], self._cache))
            self._slot = slot
        self._request.infer()
        return self._rows


class HeadGraph:
    """The output layer, over so many rows of any sequences as it was compiled for."""

    def __init__(self, compiled: Any) -> None:
        import openvino as ov

        self._request = compiled.create_infer_request()
        self.rows = np.zeros(tuple(compiled.input("rows").get_shape()), np.float32)
        self._request.set_tensor("rows", ov.Tensor(self.rows, shared_memory=True))

    def run(self) -> NDArray[np.float32]:
        """Return the logits of `rows`, (rows, vocabulary), valid until the next run."""
        self._request.infer()
        logits: NDArray[np.float32] = self._request.get_tensor("logits").data[0]
        return logits


def _tensor(values: NDArray[Any], cache: StaticKvShape) -> Any:
    import openvino as ov

    if cache.precision is not Precision.BF16:
        return ov.Tensor(values, shared_memory=True)
    return ov.Tensor(values, ov.Shape(list(values.shape)), ov.Type.bf16)


class Compiler:
    """Fixes the shapes of a prepared model's graphs and compiles them for a device."""

    def __init__(self, core: Any, prepared: Path, device: str, settings: dict[str, Any], cache: StaticKvShape) -> None:
        """Read the graphs. Raises ModelRefused when a file is gone or damaged."""
        self._core, self._device, self._settings, self._cache = core, device, settings, cache
        self._name = prepared.parent.name
        try:
            self.plan: dict[str, Any] = json.loads((prepared / PLAN_FILE).read_text(encoding="utf-8"))
            table = np.load(prepared / EMBEDDING_FILE, mmap_mode="r")
            self._body, self._head = (core.read_model(prepared / name) for name in (BODY_FILE, HEAD_FILE))
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelRefused(
                f"{prepared}: cannot be read ({error}). Delete the directory, and start again."
            ) from error
        self.embedding = Embedding(table, bfloat16=self.plan["embedding_bfloat16"])

    def body(self, width: int) -> BodyGraph:
        """Return the layers for `width` rows. Raises ModelRefused when the device cannot run them."""
        from openvino.preprocess import PrePostProcessor

        cache, model = self._cache, self._body.clone()
        places = {"hidden": [1, width, self.plan["hidden"]], "places": [width]}
        past = [1, cache.kv_heads, cache.capacity, cache.head_dim]
        self._fix(
            model,
            lambda name: (
                places.get(name)
                or {"bias": [1, 1, width, cache.capacity], "past": past}.get(name.partition(".")[0])
                or [1, 1, width, cache.head_dim]
            ),
        )
        convert = PrePostProcessor(model)
        for port in model.inputs:
            if port.any_name.startswith("past."):
                convert.input(port.any_name).tensor().set_element_type(self._kind)
        convert.output("present").tensor().set_element_type(self._kind)
        return BodyGraph(self._compile(convert.build()), width, cache)

    def head(self, width: int) -> HeadGraph:
        """Return the output layer for `width` rows. Raises ModelRefused when the device cannot run it."""
        model = self._head.clone()
        self._fix(model, lambda name: [1, width, self.plan["hidden"]])
        return HeadGraph(self._compile(model))

    @property
    def _kind(self) -> Any:
        import openvino as ov

        return {Precision.BF16: ov.Type.bf16, Precision.FP16: ov.Type.f16}.get(self._cache.precision, ov.Type.f32)

    def _fix(self, model: Any, shape_of: Any) -> None:
        import openvino as ov

        model.reshape({port.any_name: ov.PartialShape(shape_of(port.any_name)) for port in model.inputs})
        if model.is_dynamic():
            raise ModelRefused(
                f"{self._name}: a graph has no fixed shape. This is a mistake of ours; please report it."
            )

    def _compile(self, model: Any) -> Any:
        try:
            return self._core.compile_model(model, self._device, self._settings)
        except FAILURES as error:
            failure = classify_openvino_failure(error)
            if not isinstance(failure, RuntimeFailed):
                raise failure from error
            reason = str(error).strip().splitlines()[-1]
            raise ModelRefused(f"OpenVINO cannot run {self._name} on {self._device}: {reason}") from error


class Embedding:
    """The embedding's rows, mapped from their file."""

    def __init__(self, table: NDArray[Any], *, bfloat16: bool) -> None:
        self._table, self._bfloat16 = table, bfloat16

    def write(self, tokens: Sequence[int], rows: NDArray[np.float32]) -> None:
        """Write the tokens' vectors to `rows`, (tokens, hidden)."""
        values = self._table[list(tokens)]
        rows[...] = (values.astype(np.uint32) << 16).view(np.float32) if self._bfloat16 else values
