"""torch's errors as the contract's."""

from __future__ import annotations

from adapters.contract import DeviceLost
from adapters.failures import classify_failure


def classify_torch_failure(error: BaseException) -> DeviceLost:
    """Return what a failure of a forward or of a load means."""
    import torch

    return classify_failure(error, "torch", out_of_memory=(torch.OutOfMemoryError,))
