"""Tools in a request: what may be called, what was called, and the form in which the model is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from orchestrator.daemon.api.body import Body, Offered, Said, check_kind
from orchestrator.daemon.api.tools.calls import CLOSE, OPEN
from orchestrator.daemon.api.tools.hosted import CLIENT_RUN, NO_SERVER_TOOLS, RESPONSES_HOSTED

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
FullName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,129}$")]
"""A function's name, behind that of its namespace and a point where it has one."""

_HOW_TO_CALL = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Function(Offered):
    """A function that the model may call. `parameters` is a JSON schema; none takes no arguments.

    `strict`: arguments follow the schema. They do in any case where a call is forced (`tool_choice` "required" or a
    name).
    """

    name: FullName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments; without one the function takes none."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(Offered):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return what the model is told."""
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.function.schema_of_arguments}}


_OTHER_KINDS = CLIENT_RUN | dict.fromkeys(RESPONSES_HOSTED, NO_SERVER_TOOLS)
OfferedTool = Annotated[Tool, BeforeValidator(lambda tool: check_kind(tool, ("function",), "tools", "", _OTHER_KINDS))]
"""A tool as it is sent, which may be of a kind that is not taken."""


class _ChosenFunction(Body):
    name: str


class NamedChoice(Body):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: _ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(Said):
    """`arguments` is JSON text, as the model wrote it; null where it wrote none."""

    name: str
    arguments: str | None

    def plain(self) -> dict[str, Any]:
        """Return it with its arguments as an object, where the model wrote one: templates print them as JSON. Clients
        send "", "null" or null of a call without arguments."""
        written = self.arguments or ""
        try:
            arguments = json.loads(written) if written.strip() else None
        except (ValueError, RecursionError):
            arguments = written
        if arguments is None:
            arguments = {}
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else written}


class ToolCall(Said):
    """A call in a message of the assistant. What only a streamed one has (`index`) is left out."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return what chat templates expect."""
        return {"id": self.id or "", "type": "function", "function": self.function.plain()}


def render_tool_messages(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return messages for a template that knows no tools.

    Tools are described in the system message, and calls are written in Hermes' form. Results come as messages of the
    user, between `<tool_response>` tags.
    """
    written: list[dict[str, Any]] = []
    if tools:
        described = "\n".join(json.dumps(tool.plain(), ensure_ascii=False) for tool in tools)
        written.append({"role": "system", "content": _HOW_TO_CALL.format(tools=described)})
    in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if in_results:
                written[-1] = {**written[-1], "content": f"{written[-1]['content']}\n{result}"}
            else:
                written.append({"role": "user", "content": result})
        elif tools and message["role"] == "system" and message is messages[0]:
            written[0] = {**written[0], "content": f"{message['content']}\n\n{written[0]['content']}"}
        else:
            written.append(_with_calls_written(message))
        in_results = is_result
    return written


def _with_calls_written(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"], *written] if message["content"] else written)}
