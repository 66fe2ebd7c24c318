"""Where the figures of a device come from: measured or stated, the planner takes both alike."""

from orchestrator.planning.estimates import Stated
from orchestrator.planning.stored import MeasuredHardware

DeviceSource = MeasuredHardware | Stated
"""A kind of device. `memory_bytes` is its own, 0 where it works in the host's memory. `cores` are those of a processor,
else 0. Rates and power are 0 or empty where not known. `sheet` states them; it is None where they are measured."""
