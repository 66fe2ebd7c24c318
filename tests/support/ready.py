"""What workers of tests say of themselves once they serve."""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.protocol.ready import Ready, ReadyDevice, ReadyKv, ReadyModel, ReadyPrecision

PLAIN = Ready(
    ReadyModel("toy", vocabulary_size=1000, vocabulary_fingerprint="toy", context_tokens=4096),
    ReadyDevice("scripted", "CPU", "none"),
    ReadyPrecision("none", "none", "none", "bit", row_invariant=True),
    ReadyKv(1024, 32),
    slots=4,
    pid=1,
    load_s=0.0,
)


def change_ready(ready: Ready, **changes: Any) -> Ready:
    """Return it with other values, by the names that `outrider status --json` has for them."""
    parts: dict[str, Any] = {}
    for part in ready.__struct_fields__:
        value = getattr(ready, part)
        if not isinstance(value, msgspec.Struct):
            continue
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        if its := {field: changes.pop(name) for name, field in names if name in changes}:
            parts[part] = msgspec.structs.replace(value, **its)
    return msgspec.structs.replace(ready, **parts, **changes)
