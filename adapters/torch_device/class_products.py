"""The products of a class of transformers as it stands, by kernels in which a row's bits do not depend on the others.

Linear layers get another module. Matrices that a class multiplies by itself (a router's, each expert's) stay where they
are, as what torch's own functions hand their work over to (`__torch_function__`). So experts are computed by the
family's own code, and each of their products is one of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from adapters.contract import ModelRefused
from adapters.torch_device.plan import Shapes
from adapters.torch_device.products import Products, TiledLinear

_MULTIPLYING = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
"""Functions of rows and a matrix (inputs, outputs)."""
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_QUANTISED = "quantization_scheme"
"""What compressed-tensors hangs on a linear layer whose weights it holds compressed."""


class ProductWeight:
    """A matrix, (outputs, inputs), or one for each expert in front of that, that torch's functions multiply by. Whether
    it lies the other way around shows at its first product; then it is packed, once."""

    def __init__(self, values: Any, make: Callable[[Any], nn.Module], name: str) -> None:
        self._values, self._make, self._name = values, make, name
        self.shape, self.dtype, self.device, self.ndim = values.shape, values.dtype, values.device, values.ndim
        self._product: nn.Module | None = None
        self._transposed = False
        self._widened: ProductWeight | None = None
        self._experts: list[ProductWeight] = []

    def size(self, *places: int) -> Any:
        """See torch.Tensor.size."""
        return self.shape[places[0]] if places else self.shape

    def dim(self) -> int:
        """See torch.Tensor.dim."""
        return int(self.ndim)

    def to(self, dtype: Any) -> ProductWeight:
        """Return the matrix in a type, in which routers are computed. Raises ModelRefused for anything else."""
        if not isinstance(dtype, torch.dtype):
            raise ModelRefused(f"its class moves {self._name}")
        if dtype is self.dtype:
            return self
        if self._widened is None:
            self._widened = ProductWeight(self._values.to(dtype), self._make, self._name)
            self._values = None
        return self._widened

    type = to

    def float(self) -> ProductWeight:
        """See torch.Tensor.float."""
        return self.to(torch.float32)

    def __getitem__(self, place: Any) -> ProductWeight:
        """Return an expert's matrix. Raises ModelRefused for anything else of it."""
        if (
            self.ndim != 3
            or not isinstance(place, int | torch.Tensor)
            or (isinstance(place, torch.Tensor) and place.numel() != 1)
        ):
            raise ModelRefused(f"its class does more with {self._name} than to multiply by it")
        return self._list_experts()[int(place)]

    def _list_experts(self) -> list[ProductWeight]:
        if not self._experts:
            self._experts = [ProductWeight(part, self._make, self._name) for part in self._values]
        return self._experts

    def pack(self) -> None:
        """Let go of the matrices, all experts' at once, after one was used."""
        used = next((expert for expert in self._experts if expert._product is not None), None)
        if used is None:
            return
        for expert in self._experts:
            expert._multiplies(transposed=used._transposed)
        self._values = None

    def _multiplies(self, *, transposed: bool) -> nn.Module:
        if self._product is None:
            self._transposed = transposed
            self._product = self._make(self._values.t().contiguous() if transposed else self._values.contiguous())
            self._values = None
        elif transposed is not self._transposed:
            raise ModelRefused(f"its class multiplies by {self._name} and by its transpose")
        return self._product

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute one of torch's functions of which a ProductWeight is an argument. Raises ModelRefused for those that
        are no product by it."""
        given = dict(options or {})
        if function is nn.functional.linear:
            rows, weight = arguments[0], arguments[1] if len(arguments) > 1 else given["weight"]
            bias = arguments[2] if len(arguments) > 2 else given.get("bias")
            made = weight._multiplies(transposed=False)(rows)
            return made if bias is None else made + bias
        if function in _MULTIPLYING and isinstance(arguments[1], cls) and arguments[1].ndim == 2:
            return arguments[1]._multiplies(transposed=True)(arguments[0])
        if function is torch.addmm and isinstance(arguments[2], cls):
            return arguments[0] + arguments[2]._multiplies(transposed=True)(arguments[1])
        if function is torch.bmm and isinstance(arguments[1], cls):
            pairs = zip(arguments[0], arguments[1]._list_experts(), strict=True)
            return torch.stack([expert._multiplies(transposed=True)(rows) for rows, expert in pairs])
        name = next((each._name for each in (*arguments, *given.values()) if isinstance(each, cls)), "a matrix")
        raise ModelRefused(f"its class computes {getattr(function, '__name__', function)} of {name}")


class ClassProducts:
    """Gives all matrices of a network products of ours; those that transformers holds quantised keep its own."""

    def __init__(self, products: Products, shapes: Shapes) -> None:
        """`products` makes them of as many rows as come."""
        self._products, self._shapes = products, shapes
        self._weights: list[ProductWeight] = []

    def place(self, network: Any, at: str = "") -> None:
        """Take the matrices out of a network, or out of what stands `at` a place in it, one after the other. Raises
        torch's errors when memory runs out."""
        for name, child in list(network.named_children()):
            if type(child) is nn.Linear and not hasattr(child, _QUANTISED):
                setattr(network, name, self.make(child.weight.data, child.bias))
            elif "Linear" in type(child).__name__ and not list(child.children()):
                setattr(network, name, self._shape(child))
            elif not isinstance(child, _TABLES):
                self.place(child, f"{at}{name}.")
        for name, value in list(network.named_parameters(recurse=False)):
            if value.ndim in (2, 3) and value.is_floating_point() and "bias" not in name:
                delattr(network, name)
                self._weights.append(ProductWeight(value.data, self.make, f"{at}{name}"))
                setattr(network, name, self._weights[-1])

    def pack(self) -> None:
        """Pack the experts that no row has met yet."""
        for weight in self._weights:
            weight.pack()

    @property
    def has_experts(self) -> bool:
        """Whether which products there are depends on the rows."""
        return any(weight.ndim == 3 for weight in self._weights)

    def make(self, weight: Any, bias: Any = None) -> nn.Module:
        """Return the product over a matrix on the device. Raises torch's errors when memory runs out."""
        product = self._shape(self._products.make(weight, None if bias is None else bias.data))
        product.weight = weight.new_empty(0)  # classes look at its type
        return product

    def _shape(self, product: nn.Module) -> nn.Module:
        return TiledLinear(product, self._shapes.product_tile, self._shapes.least_rows)
