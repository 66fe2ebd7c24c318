"""Models that do what another one does, but for what a test wants otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class WrappedModel:
    """Has each member of the model that it is made of, except those that its own class has.

    They are members of a class made for it, and not found by `__getattr__`: from Python 3.12 on `isinstance` does not
    ask that whether an object has what a protocol wants.
    """

    def __init__(self, model: Any) -> None:
        self._wrapped = model
        own = type(self)
        members = {name: _pass_on(name) for name in dir(model) if not (name.startswith("__") or hasattr(own, name))}
        self.__class__ = type(own.__name__, (own,), members)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _pass_on(name: str) -> property:
    return property(lambda self: getattr(self._wrapped, name))
