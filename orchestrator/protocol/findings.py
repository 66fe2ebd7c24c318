"""What a measuring worker finds, as it crosses the process border."""

from __future__ import annotations

import msgspec

from device_profiles.acceptance import PairAcceptance, TargetTexts
from device_profiles.link import LinkProfile
from device_profiles.measured import MeasuredDevice, MeasuredModel
from orchestrator.protocol.links.address import LinkEndpoint

Finding = MeasuredDevice | MeasuredModel | PairAcceptance | TargetTexts | LinkProfile
KINDS: dict[str, type] = {
    "device": MeasuredDevice,
    "model": MeasuredModel,
    "pair": PairAcceptance,
    "texts": TargetTexts,
    "link": LinkProfile,
}
"""What a Measured event holds, by its kind."""

CHAT_WORKLOAD = "chat"
"""What acceptance is measured on where nobody names other texts (worker.measuring.texts)."""


class ProbeOptions(msgspec.Struct, frozen=True):
    """An endpoint, and the names of both ends."""

    endpoint: LinkEndpoint
    left: str
    right: str
