"""Linear layers whose weights checkpoints of GPTQ and AWQ pack into 32-bit words, as numbers.

Inputs of a group share a scale and a zero for each output: a weight is scale x (value - zero). Layouts are those of
AutoGPTQ's and AutoAWQ's `pack`, as transformers' integrations read them (gptqmodel 7.7, gptqmodel/nn_modules/qlinear).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused

AWQ: Final = "awq"
GPTQ: Final = "gptq"
PACKED_FORMS: Final = (AWQ, GPTQ)
PACKED_WEIGHT: Final = ".qweight"
"""How the name of a layer's packed values ends; what else belongs to the layer lies beside it."""
_BESIDE: Final = (".qzeros", ".scales", ".g_idx")
# The format's own.
_WORD_BITS: Final = 32
# Of those that fill a word. 3 bits of GPTQ lie across words.
_BITS: Final = {AWQ: (4,), GPTQ: (2, 4, 8)}
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs AutoAWQ's words hold, from the lowest bits on."""
_ADDS_ONE: Final = "gptq"
"""The form of GPTQ's checkpoints that hold each zero less one; "gptq_v2" holds it as it is."""

Words = NDArray[np.int32]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a checkpoint packs. `method`: of PACKED_FORMS; `less`: what its zeros lack."""

    method: str
    bits: int
    less: int

    def unpack(self, name: str, parts: Mapping[str, NDArray[Any]]) -> Matrix:
        """Return a layer's weights, shape (outputs, inputs), by its tensors' last names: `qweight`, `qzeros`, `scales`
        and, where inputs are in groups of their own, `g_idx`. Raises ModelRefused where they do not go together."""
        try:
            scales = parts["scales"].astype(np.float32)
            zeros = (self._split(parts["qzeros"]) + self.less) & self._mask
            values = self._split(parts["qweight"] if self.method == AWQ else parts["qweight"].T)
            values = values if self.method == AWQ else values.T  # (inputs, outputs)
            size = len(values) // len(scales)
            groups = parts["g_idx"] if "g_idx" in parts else np.arange(len(values)) // size
            centred = values.astype(np.float32) - zeros.astype(np.float32)[groups]
            return np.ascontiguousarray((centred * scales[groups]).T)
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
            raise ModelRefused(f"{name}: its packed tensors do not go together ({error}). Load it anew.") from error

    @property
    def _mask(self) -> int:
        return (1 << self.bits) - 1

    def _split(self, words: Words) -> NDArray[np.uint32]:
        """Return the values in words, the last axis longer by as many as a word holds."""
        count = _WORD_BITS // self.bits
        places = [_AWQ_ORDER.index(place) for place in range(count)] if self.method == AWQ else range(count)
        shifts = np.array([self.bits * place for place in places], np.uint32)
        unsigned = np.ascontiguousarray(words).view(np.uint32)
        return ((unsigned[..., None] >> shifts) & np.uint32(self._mask)).reshape(*words.shape[:-1], -1)


def read_packed_form(config: Mapping[str, Any], where: str) -> PackedForm | None:
    """Return how a `quantization_config` packs, None for another method. Raises ModelRefused, by the key, for a form
    that is not read here."""
    method = config.get("quant_method")
    if method not in PACKED_FORMS:
        return None
    bits = config.get("bits", config.get("w_bit", 4))
    form = config.get("checkpoint_format", "") if method == GPTQ else config.get("version", "gemm")
    known = ("", "gptq", "gptq_v2") if method == GPTQ else ("gemm", "GEMM")
    key = "checkpoint_format" if method == GPTQ else "version"
    for name, value, accepted in (("bits", bits, _BITS[method]), (key, form, known)):
        if value not in accepted:
            others = ", ".join(str(each) for each in accepted if each)
            raise ModelRefused(
                f"{where}: quantization_config.{name}: {method} in {value!r} is not run on a processor; {others} is. "
                "Choose the model's weights in 16 bits, or a CUDA device."
            )
    return PackedForm(method, bits, 1 if method == GPTQ and form in ("", _ADDS_ONE) else 0)


def list_parts(names: Mapping[str, Any], packed: str) -> dict[str, str]:
    """Return the names of what belongs to a packed tensor, itself included, by their last names."""
    layer = packed.removesuffix(PACKED_WEIGHT)
    return {end[1:]: layer + end for end in (PACKED_WEIGHT, *_BESIDE) if layer + end in names}
