"""What an adapter raises.

AdapterError
+-- AdapterUnavailable   the framework is not installed; the message is the install command
+-- ModelRefused         the file is damaged, or of a kind that this adapter cannot run
+-- Unsupported          the request is outside the stated capabilities (a caller's mistake)
+-- GrammarFailed        a grammar is wrong; the request cannot go on
|   +-- GrammarTooComplex  it became too complex for its text (the client's grammar, no failure)
+-- CapacityError        no KV blocks or slots are left; nothing was changed, free some and try again
+-- DeviceLost           the device or its runtime failed; the loaded model is dead
    +-- OutOfMemory      no memory was left; where it `can_go_on` a smaller forward may fit, else the model is dead
    +-- MemoryCorrupt    the device's memory has an error that its ECC could not correct
    +-- Overheated       the device is too hot
    +-- RuntimeFailed    the runtime failed, and does not say that the device did
"""

from __future__ import annotations


class AdapterError(Exception):
    """Root of what an adapter raises."""


class AdapterUnavailable(AdapterError):
    """The framework is missing; the message names the install command."""


class ModelRefused(AdapterError):
    """The model file is damaged or of a kind that this adapter cannot run; the message names the file."""


class Unsupported(AdapterError):
    """The call is outside the stated capabilities."""


class GrammarFailed(AdapterError):
    """A grammar is wrong or uses what its library does not support, or it became too complex for its text."""


class GrammarTooComplex(GrammarFailed):
    """Behind its text so far a grammar may go on in more ways than its library follows: a simpler one is needed."""


class CapacityError(AdapterError):
    """No KV blocks or slots are left. Nothing was changed."""


class DeviceLost(AdapterError):
    """The device or its runtime failed; the loaded model can no longer be used."""


class OutOfMemory(DeviceLost):
    """The device ran out of memory. `can_go_on`: the loaded model lives. What slots hold in front of the segments of
    that forward is as it was, and what they hold from there on is to be written again."""

    def __init__(self, message: str, *, can_go_on: bool = False) -> None:
        super().__init__(message)
        self.can_go_on = can_go_on


class MemoryCorrupt(DeviceLost):
    """The device's memory has an error that its ECC could not correct; the loaded model can no longer be used."""


class Overheated(DeviceLost):
    """The device is too hot, and stopped; the loaded model can no longer be used."""


class RuntimeFailed(DeviceLost):
    """The runtime failed for a reason that nobody could place; the loaded model can no longer be used."""


class NoKernel(DeviceLost):
    """The runtime has no code for a part of the model on this device, and will have none: nothing was lost."""
