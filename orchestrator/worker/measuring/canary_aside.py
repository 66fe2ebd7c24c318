"""Benchmarks and profiles measure what all requests but the canary's get."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loaded where a configuration is read
    from orchestrator.config.model import ClusterConfig


def leave_out_canary(config: ClusterConfig) -> ClusterConfig:
    """Return a configuration whose canary is no part of what is measured now, and say so where it has one."""
    from orchestrator.config.speculation import Canary

    if config.canary.share:
        sys.stderr.write(
            "outrider: the canary takes no part in this: what all other requests get is measured; "
            "`outrider canary status` compares both while the daemon serves\n"
        )
    return config.model_copy(update={"canary": Canary()})
