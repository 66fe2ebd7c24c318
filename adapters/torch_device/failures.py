"""torch's errors as the contract's."""

from __future__ import annotations

import logging

from adapters.contract import DeviceLost
from adapters.failures import classify_failure

_LOGGERS = ("torchao", "torch.utils._pytree")


def quieten() -> None:
    """Let through errors only: it warns of kernels for devices that are not here, and of torch's deprecations."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def classify_torch_failure(error: BaseException) -> DeviceLost:
    import torch

    return classify_failure(error, "torch", out_of_memory=(torch.OutOfMemoryError,))
