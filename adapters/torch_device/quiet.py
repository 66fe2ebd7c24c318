"""Keeps torchao's import from the operator's terminal; transformers imports it too, wherever it is installed."""

from __future__ import annotations

import logging

_LOGGERS = ("torchao", "torch.utils._pytree")


def quieten() -> None:
    """Let through errors only: it warns of kernels for devices that are not here, and of torch's deprecations."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
