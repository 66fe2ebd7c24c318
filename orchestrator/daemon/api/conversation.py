"""What a conversation is made of: strict parts and parts that come from anywhere, tools and their calls, messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.daemon.api.tools.hosted import CLIENT_RUN, NO_SERVER_TOOLS, RESPONSES_HOSTED
from orchestrator.daemon.api.tools.syntaxes import CLOSE, OPEN

NO_MEDIA = "the served model takes text only"
_SHOWN_CHARS = 60  # of a value in a message. Not tuned.
# ADR 0101: likeness by difflib from which a key counts as misspelt. `paramters` is at 0.95.
_ALIKE = 0.8
# Keys of messages that put something else before the model than the text does.
_CHANGE_THE_PROMPT = ("images", "audio", "videos", "function_call", "prefix", "partial")
# What others call the schema of a tool's arguments.
_OTHER_SCHEMAS = frozenset({"input_schema", "inputSchema", "args_schema", "schema", "parametersJsonSchema"})
_IDLE: tuple[Any, ...] = (None, False, "", [], {})
MAX_TOOLS = 128  # OpenAI's
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
_OTHER_KINDS = CLIENT_RUN | dict.fromkeys(RESPONSES_HOSTED, NO_SERVER_TOOLS)
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The names under which servers tell of a thought; templates know the first."""
_MEDIA = dict.fromkeys(("image", "input_image", "audio", "input_audio", "video", "file", "input_file"), NO_MEDIA)
# What the server itself gives to the template, or Jinja does.
_OWN_KEYWORDS = frozenset({
    *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"),
    *("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop"),
    *("self", "super", "varargs", "kwargs", "caller"),
})  # fmt: skip
# Longer than the word of any template (ADR 0101).
_EFFORT_CHARS = 32
Effort = Annotated[str, Field(min_length=1, max_length=_EFFORT_CHARS)]
"""How much the model is to think, in the words of its template."""


class Body(BaseModel):
    """A strict part of a request. A null asks for nothing: it counts as left out, whatever it is of."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or _is_required(cls, key)}


class Said(BaseModel):
    """A part of a conversation. Clients send back what servers said, with whatever fields those have: fields that say
    nothing to a model are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Offered(Said):
    """A part of a tool. Hints for caches and clients are left out; a field that another one seems to mean, and that is
    not there itself, is refused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelt(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [field.alias or name for name, field in cls.model_fields.items()]
        left = [name for name in known if name not in data]
        for key in data.keys() - set(known):
            alike = difflib.get_close_matches(key, left, n=1, cutoff=_ALIKE) or [""]
            meant = "parameters" if key in _OTHER_SCHEMAS and "parameters" in left else alike[0]
            if meant and data[key] is not None:
                text = f"unknown field {show(key)} of a tool; did you mean '{meant}'?"
                raise PydanticCustomError("unknown_field", "{text}", {"field": "tools", "text": text})
        return {key: value for key, value in data.items() if value is not None or _is_required(cls, key)}


def show(text: str) -> str:
    """Return a text of a client's as errors show it: short, quoted, and all of it can be sent."""
    return repr(text[:_SHOWN_CHARS].encode("utf-8", "backslashreplace").decode())


def tag_kind(part: Any) -> str:
    """Return the tag that a part's `type` chooses its model by."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"kind={kind}"


def check_kind(value: Any, known: Collection[str], what: str, field: str, ways_out: Mapping[str, str]) -> Any:
    """Return a part whose `type` is known. Raises PydanticCustomError with what is taken, and the way out. `field`:
    what the error names; with "" the place of the part."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known:
        way_out = next((text for prefix, text in ways_out.items() if kind.startswith(prefix)), "")
        why = f": {way_out}" if way_out else ""
        taken = ", ".join(f"'{name}'" for name in sorted(known))
        text = f"{what} of type {show(kind)} are not supported{why} (taken: {taken})"
        named = {"field": field} if field else {"inside": "type"}
        raise PydanticCustomError("not_supported", "{text}", {"text": text, **named})
    return value


def refuse_prompt_keys(data: Any) -> Any:
    """Return a message without keys that would change the prompt and are not served, where they ask for nothing.
    Raises PydanticCustomError where they ask for something."""
    if not isinstance(data, dict):
        return data
    for key in _CHANGE_THE_PROMPT:
        if key in data and not any(data[key] is idle or data[key] == idle for idle in _IDLE):
            why = "send 'tool_calls' instead" if key == "function_call" else "it would change what the model reads"
            text = f"'{key}' of a message is not supported: {why}"
            raise PydanticCustomError("not_supported", "{text}", {"inside": key, "text": text})
    return {key: value for key, value in data.items() if key not in _CHANGE_THE_PROMPT}


def refuse_empty(role: str, content: Any) -> None:
    """Raise PydanticCustomError where a message has no content that its role needs."""
    if content is None or (content == [] and role != "tool"):
        text = f"a message of the role '{role}' has no 'content'"
        raise PydanticCustomError("missing_parameter", "{text}", {"inside": "content", "text": text})


def _is_required(cls: type[BaseModel], key: str) -> bool:
    return any(key in (name, field.alias) and field.is_required() for name, field in cls.model_fields.items())


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
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.function.schema_of_arguments}}


OfferedTool = Annotated[Tool, BeforeValidator(lambda tool: check_kind(tool, ("function",), "tools", "", _OTHER_KINDS))]
"""A tool as it is sent, which may be of a kind that is not taken."""


class _ChosenFunction(Body):
    name: str


class NamedChoice(Body):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: _ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class HostedTool(Said):
    """A tool that another server would run: the model is not told of it."""

    type: str
    name: str | None = None


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


class TextPart(Said):
    """Text of a content."""

    type: Literal["text"]
    text: str

    @property
    def words(self) -> str:
        return self.text


class RefusalPart(Said):
    """What the assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def words(self) -> str:
        return self.refusal


class ThinkingPart(Said):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str


Part = Annotated[
    Annotated[TextPart, Tag("kind=text")]
    | Annotated[RefusalPart, Tag("kind=refusal")]
    | Annotated[ThinkingPart, Tag("kind=thinking")],
    Discriminator(tag_kind),
    BeforeValidator(lambda part: check_kind(part, ("text", "refusal", "thinking"), "contents", "", _MEDIA)),
]
Text = Annotated[TextPart, BeforeValidator(lambda part: check_kind(part, ("text",), "contents", "", _MEDIA))]


class Message(BaseModel):
    """One chat message. `tool_calls` are the assistant's, `tool_call_id` says which of them a tool answers. Unknown
    fields (names) are handed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return what chat templates expect: content as one string, "developer" as the "system" that it replaced,
        the arguments of calls as objects, and thoughts under one name."""
        role = "system" if self.role == "developer" else self.role
        plain = {**(self.model_extra or {}), "role": role, "content": self._words}
        if thought := self._thought:
            plain["reasoning_content"] = thought
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain

    @property
    def _words(self) -> str:
        if isinstance(self.content, str):
            return self.content or self.refusal or ""
        words = (part.words for part in self.content or [] if not isinstance(part, ThinkingPart))
        return "".join(words) or self.refusal or ""

    @property
    def _thought(self) -> str:
        """What was thought before it, under whatever name it came."""
        thoughts = ((self.model_extra or {}).get(name) for name in _THOUGHTS)
        parts = self.content if isinstance(self.content, list) else []
        inside = "".join(part.thinking for part in parts if isinstance(part, ThinkingPart))
        return next((text for text in thoughts if isinstance(text, str) and text), inside)

    _nothing_that_changes_the_prompt = model_validator(mode="before")(refuse_prompt_keys)

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Message:
        if self.role != "assistant":
            refuse_empty(self.role, self.content)
            _refuse_the_assistants(self)
        elif not (self.tool_calls or self.refusal or self._thought):
            refuse_empty(self.role, self.content if self.content != [] else "")
        return self


def _refuse_the_assistants(message: Message) -> None:
    if message.tool_calls:
        text = "'tool_calls' are the assistant's, not those of a message with the role '{role}'"
        raise PydanticCustomError("tools", text, {"role": message.role})
    parts = message.content if isinstance(message.content, list) else []
    wrong = next((part.type for part in parts if not isinstance(part, TextPart)), None)
    if wrong is not None:
        text = f"a message of the role '{message.role}' has no contents of type '{wrong}'"
        raise PydanticCustomError("invalid_combination", "{text}", {"inside": "content", "text": text})


class Prediction(Body):
    """What the client expects the answer to be. Drafts come from it; it never changes the answer."""

    type: Literal["content"]
    content: str | list[Text]

    @property
    def text(self) -> str:
        """The expected text; several parts are one text."""
        return self.content if isinstance(self.content, str) else "".join(part.words for part in self.content)


def _check_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return what a template may be told. Raises PydanticCustomError for what the server itself tells it."""
    field = "chat_template_kwargs"
    wrong = next((key for key in keywords if not key.isidentifier() or key.startswith("_")), None)
    own = next((key for key in keywords if key in _OWN_KEYWORDS), None)
    if wrong is not None:
        text = f"'{field}' has the key {show(wrong)}, which is no name of a template's variable"
        raise PydanticCustomError("invalid_combination", "{text}", {"field": field, "text": text})
    if own is not None:
        text = f"'{field}' cannot set '{own}': the server gives it to the template itself"
        raise PydanticCustomError("not_supported", "{text}", {"field": f"{field}.{own}", "text": text})
    return keywords


TemplateKeywords = Annotated[dict[str, Any], AfterValidator(_check_keywords)]
"""What a chat template is told beside messages and tools, such as `enable_thinking`. It ignores what it does
not know."""


def collect_keywords(effort: str | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    switches: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        switches["enable_thinking"] = False
    return switches | dict(keywords)
