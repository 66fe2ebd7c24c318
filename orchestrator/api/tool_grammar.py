"""The grammar of an answer that must be a tool call, in Hermes' form: exact JSON, as the schemas want it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from orchestrator.api.tool_calls import CLOSE, OPEN
from orchestrator.api.tool_wire import Tool

# As Python's json.dumps writes it, which is what models are trained on; it also cannot go on for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def calls_of(tools: Sequence[Tool], *, many: bool) -> str:
    """Return a Lark grammar of one call of one of the tools; with `many` of one or more, a line apart."""
    rules = ["start: call" + (' ("\\n" call)*' if many else "")]
    bodies = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules.append(f'call: "{OPEN}\\n" ({bodies}) "\\n{CLOSE}"')
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
        schema = tool.function.schema_of_arguments | {"x-guidance": _STYLE}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules)
