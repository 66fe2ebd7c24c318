"""Tools that are no functions: those that other servers run, and those that clients run under a name of the API's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

RESPONSES_HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
    "programmatic_tool_calling",
)
"""How types of tools begin that OpenAI's server runs."""
MESSAGES_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""How types of tools begin that Anthropic's server runs."""
_BUILT_IN = "it runs at the client, by a schema that models are trained on elsewhere; offer a function that does it"
CLIENT_RUN = {
    "custom": "its calls are free text; offer a function with one string instead",
    **dict.fromkeys(
        ("shell", "local_shell", "apply_patch", "computer", "bash_", "text_editor_", "memory_", "browser_"), _BUILT_IN
    ),
}
"""How types of tools begin that clients run, and what to offer instead."""
NO_SERVER_TOOLS = "tools that run on a server are not served here; offer a function"
FORCED_HOSTED = "'tool_choice' forces a tool that runs on a server, and none do here: offer a function"


def is_hosted(kind: Any, beginnings: Collection[str]) -> bool:
    return isinstance(kind, str) and kind.startswith(tuple(beginnings))
