"""How calls are written: what may begin one in a text, and how its name and arguments are read.

After what the makers of the models publish: Hermes' and Llama's JSON, Llama's lists of Python calls, Mistral's
`[TOOL_CALLS]`, Qwen3-Coder's and GLM's tags, DeepSeek's control tokens. A reader is given what was held since a call
may have begun, as a whole, each time that it has grown, and at the `last`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from adapters.output_form import LISTS, write_deepseek_control

_STRING = r'"(?:[^"\\]|\\.)*"'
# A call written in this order can be passed on while it comes.
_JSON_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*'
    rf'(?P<name>{_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_FIRST_KEY = re.compile(rf"\{{\s*({_STRING}|[^\s\"])")
_CALL_KEYS = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"', '"id"')
_SPECIAL = re.compile(r'["{}\[\]]')
_INSIDE_TEXT = re.compile(r'"|\\.', re.DOTALL)
_NAME, _SPACE = r"[a-zA-Z0-9_.-]+", r"\s*"
_PYTHON_SPECIAL = re.compile(r"""["'()\[\]{}]""")
_PYTHON_QUOTED = re.compile(r"""["']|\\.""", re.DOTALL)
_PYTHON_WORDS: Final = {"true": True, "false": False, "null": None}
"""What JSON writes for Python's own words: models mix them up."""
_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END = DEEPSEEK_CONTROLS = tuple(
    map(write_deepseek_control, ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end"))
)
JsonObject = dict[str, Any]


class JsonDepth:
    """Follows JSON text to where a value closes. It knows strings and brackets, and looks at nothing between them."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_text = False

    def read_until(self, text: str, start: int, depth: int) -> tuple[int, bool]:
        """Read `text` from `start` up to behind the bracket that closes down to `depth`; (place, whether it came).

        Where it did not, reading goes on at the place returned: a backslash at the end is not read yet.
        """
        place = start
        while (match := (_INSIDE_TEXT if self._in_text else _SPECIAL).search(text, place)) is not None:
            place = match.end()
            mark = match[0]
            if mark == '"':
                self._in_text = not self._in_text
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= depth:
                    return place, True
        return len(text) - text.endswith("\\") if len(text) > place else place, False


class CallHead(NamedTuple):
    """A call of `name` has begun: its JSON begins behind `size` characters, within `depth` brackets."""

    name: str
    size: int
    depth: int = 0


class WholeCall(NamedTuple):
    """A call of `size` characters. `arguments`: as JSON text; None where there are no usable ones."""

    name: str
    arguments: str | None
    size: int


class NoCall(NamedTuple):
    """What seemed to begin a call does not."""


Reading = CallHead | WholeCall | NoCall | None
"""What is read of a call; None while that is not certain."""


class CallReader(Protocol):
    def read(self, held: str, *, last: bool) -> Reading: ...


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """`openers`: what begins a call; `leading` ones do at the beginning of an answer only. `closers`: what follows a
    call, in this order, each of which may be missing. `further`: what begins another call right behind one."""

    openers: tuple[str, ...]
    reader: Callable[[], CallReader]
    closers: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    further: tuple[str, ...] = ()


class _JsonReader:
    """Reads `{"name": ..., "arguments": {...}}` behind a `prefix`. `strict`: what has another first key is no call."""

    def __init__(self, prefix: re.Pattern[str], *, strict: bool = False) -> None:
        self._prefix, self._strict = prefix, strict
        self._depth = JsonDepth()
        self._at: int | None = None

    def read(self, held: str, *, last: bool) -> Reading:
        match = self._prefix.match(held)
        start = match.end() if match is not None else len(held)
        if start == len(held):
            return None
        if held[start] != "{":
            return NoCall()
        head = _JSON_HEAD.match(held, start)
        if head is not None:
            return CallHead(load_json(head["name"]) or "", head.end(), 1)
        key = _FIRST_KEY.match(held, start) if self._strict else None
        if key is not None and key[1] not in _CALL_KEYS:
            return NoCall()
        self._at, closed = self._depth.read_until(held, start if self._at is None else self._at, 0)
        return WholeCall(*_read_call(load_json(held[start : self._at])), self._at) if closed else None


class _Shape:
    """A row of literals and expressions (tuples of one, which take any beginning), matched as the text comes."""

    def __init__(self, *parts: str | tuple[str]) -> None:
        units = [unit if isinstance(part, tuple) else re.escape(unit) for part in parts for unit in part]
        nested = ""
        for unit in reversed(units):
            nested = f"(?:{unit.replace('?P<name>', '?:')}{nested})?"
        self.whole = re.compile("".join(units))
        self._beginning = re.compile(nested)

    def begins(self, text: str) -> bool:
        """Whether more text could make it match."""
        return self._beginning.fullmatch(text) is not None


class _ShapedReader:
    """Reads heads of some shapes, which end in front of the arguments' first bracket."""

    def __init__(self, shapes: Sequence[_Shape]) -> None:
        self._shapes = shapes

    def read(self, held: str, *, last: bool) -> Reading:
        for shape in self._shapes:
            if match := shape.whole.match(held):
                return CallHead(match["name"], match.end())
        return None if any(shape.begins(held) for shape in self._shapes) else NoCall()


class _EitherReader:
    """Reads a call that is written in one of two ways."""

    def __init__(self, first: CallReader, second: CallReader) -> None:
        self._readers = [first, second]

    def read(self, held: str, *, last: bool) -> Reading:
        for reader in list(self._readers):
            reading = reader.read(held, last=last)
            if not isinstance(reading, NoCall):
                if reading is not None:
                    return reading
                continue
            self._readers.remove(reader)
        return None if self._readers else NoCall()


class _TaggedReader:
    """Reads calls whose arguments are tags, by `scan`: it returns the name, the texts of the arguments, and where the
    call ends; None while that is not certain. `types`: which arguments of a function are texts."""

    def __init__(
        self, scan: Callable[[str], tuple[str, list[tuple[str, str]], int] | NoCall | None], schemas: _Schemas
    ) -> None:
        self._scan, self._schemas = scan, schemas
        self._read = 0

    def read(self, held: str, *, last: bool) -> Reading:
        # Whatever ends a part ends in this letter: between two of them nothing becomes certain but what is no call.
        if not last and self._read and ">" not in held[self._read :] and len(held) - self._read < _RESCAN:
            return None
        self._read = len(held)
        scanned = self._scan(held)
        if scanned is None or isinstance(scanned, NoCall):
            return scanned
        name, texts, size = scanned
        properties = self._schemas.get(name, {})
        values = {key: _write_value(text, properties.get(key)) for key, text in texts}
        pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
        return WholeCall(name, f"{{{', '.join(pairs)}}}", size)


_Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of each function's arguments, as JSON schemas."""
# Characters of a value that are looked at together. Bounds how late it is seen that something is no call. Not tuned.
_RESCAN = 256


def _write_value(text: str, schema: Any) -> str:
    """Return an argument's value as JSON text: as a text where the schema takes texts, or it is no JSON."""
    types = _list_types(schema)
    if "string" not in types or (text == "null" and "null" in types):
        try:
            json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
            return text.strip()
        except (ValueError, RecursionError):
            pass
        if (word := {"True": "true", "False": "false", "None": "null"}.get(text.strip())) is not None:
            return word
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"JSON has no {word}")


def _list_types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {kind for kind in _as_list(named) if isinstance(kind, str)}
    if any(isinstance(value, str) for value in (*_as_list(schema.get("enum")), schema.get("const"))):
        types.add("string")
    return types.union(*(_list_types(option) for key in ("anyOf", "oneOf") for option in _as_list(schema.get(key))))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_SEED_OPEN, _SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
_QWEN_HEADS = [
    *(_Shape(open_, (_SPACE,), "<function=", (f"(?P<name>{_NAME})",), ">") for open_ in ("<tool_call>", _SEED_OPEN)),
    _Shape("<function=", (f"(?P<name>{_NAME})",), ">"),
]
_QWEN_KEY = _Shape((_SPACE,), "<parameter=", ("(?P<name>[^>]+)",), ">")
_QWEN_END = _Shape((_SPACE,), "</function>")


def _scan_qwen(held: str) -> tuple[str, list[tuple[str, str]], int] | NoCall | None:
    head = next((match for shape in _QWEN_HEADS if (match := shape.whole.match(held))), None)
    if head is None:
        return None if any(shape.begins(held) for shape in _QWEN_HEADS) else NoCall()
    texts, place = list[tuple[str, str]](), head.end()
    while True:
        if end := _QWEN_END.whole.match(held, place):
            return head["name"], texts, end.end()
        key = _QWEN_KEY.whole.match(held, place)
        if key is None:
            rest = held[place:]
            return None if _QWEN_KEY.begins(rest) or _QWEN_END.begins(rest) else NoCall()
        close = held.find("</parameter>", key.end())
        if close < 0:
            return None
        texts.append((key["name"].strip(), held[key.end() : close].removeprefix("\n").removesuffix("\n")))
        place = close + len("</parameter>")


_GLM_HEAD = re.compile(rf"<tool_call>\s*(?P<name>{_NAME})(?=\s*<)")
_GLM_BEGUN = _Shape("<tool_call>", (_SPACE,), (f"(?:{_NAME})?",), (_SPACE,))
_GLM_KEY = _Shape((_SPACE,), "<arg_key>", ("(?P<name>[^<]+)",), "</arg_key>", (_SPACE,), "<arg_value>")
_GLM_END = _Shape((_SPACE,), "</tool_call>")


def _scan_glm(held: str) -> tuple[str, list[tuple[str, str]], int] | NoCall | None:
    head = _GLM_HEAD.match(held)
    if head is None:
        return None if _GLM_BEGUN.begins(held) else NoCall()
    texts, place = list[tuple[str, str]](), head.end()
    while True:
        if end := _GLM_END.whole.match(held, place):
            return head["name"], texts, end.end()
        key = _GLM_KEY.whole.match(held, place)
        if key is None:
            rest = held[place:]
            return None if _GLM_KEY.begins(rest) or _GLM_END.begins(rest) else NoCall()
        close = held.find("</arg_value>", key.end())
        if close < 0:
            return None
        texts.append((key["name"].strip(), held[key.end() : close]))
        place = close + len("</arg_value>")


_PYTHON_OPENERS = ("<|python_start|>", "<|tool_call_start|>")  # Llama 4's and LFM2's
_PYTHON_HEADS = [
    _Shape(
        (rf"(?:(?:{'|'.join(map(re.escape, _PYTHON_OPENERS))})\s*\[?|\[|,)",),
        *((_SPACE,), (f"(?P<name>{_NAME})",), "("),
    ),
    *(_Shape(opener, (_SPACE,), ("\\[?",)) for opener in _PYTHON_OPENERS),
]


class _PythonReader:
    """Reads `[name(key=value, ...), ...]`, a call at a time."""

    def __init__(self) -> None:
        self._begin = 0
        self._place = 0
        self._depth = 1
        self._quote = ""

    def read(self, held: str, *, last: bool) -> Reading:
        head = _PYTHON_HEADS[0].whole.match(held)
        if head is None:
            return None if any(shape.begins(held) for shape in _PYTHON_HEADS) else NoCall()
        if not self._begin:
            self._begin = self._place = head.end()
        if not self._close(held):
            return None
        arguments = _read_keywords(held[self._begin : self._place - 1])
        return NoCall() if arguments is None else WholeCall(head["name"], arguments, self._place)

    def _close(self, held: str) -> bool:
        """Go on to behind the bracket that closes the call; False while it has not come."""
        while match := (_PYTHON_QUOTED if self._quote else _PYTHON_SPECIAL).search(held, self._place):
            self._place, mark = match.end(), match[0]
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = mark
            else:
                self._depth += 1 if mark in "([{" else -1
                if not self._depth:
                    return True
        if len(held) > self._place:
            self._place = len(held) - held.endswith("\\")
        return False


def _read_keywords(source: str) -> str | None:
    """Return the keyword arguments of a Python call as JSON text; None where they are no literals."""
    try:
        call = ast.parse(f"f({source}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {str(word.arg): _read_literal(word.value) for word in call.keywords if word.arg is not None}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return write_json(arguments) if len(arguments) == len(call.keywords) else None


def _read_literal(node: ast.expr) -> Any:
    """Return a literal's value, in which JSON's words stand for Python's. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _PYTHON_WORDS:
            return _PYTHON_WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip((key for key in keys if key is not None), values, strict=True)
            return {str(_read_literal(key)): _read_literal(value) for key, value in pairs}
        case _:
            value = ast.literal_eval(node)
            if not isinstance(value, str | int | float | bool | None):
                raise ValueError("no value of JSON")
            return value


_GEMMA_OPEN, _GEMMA_QUOTE = "<|tool_call>", '<|"|>'
_GEMMA_HEAD = _Shape(_GEMMA_OPEN, (_SPACE,), "call:", (f"(?P<name>{_NAME})",), (_SPACE,), (r"(?=\{)",))
_GEMMA_PART = re.compile(r'(?P<mark>[{}\[\]:,]|\s+)|(?P<word>[^\s{}\[\]:,<"]++)(?=\s*(?P<next>\S))')


class _GemmaReader:
    """Reads `call:name{key:value, ...}`: JSON but for keys without quotes, and texts between marks of their own."""

    def __init__(self) -> None:
        self._name = ""
        self._place = self._depth = self._looked = 0
        self._written: list[str] = []

    def read(self, held: str, *, last: bool) -> Reading:
        if not self._place:
            head = _GEMMA_HEAD.whole.match(held)
            if head is None:
                return None if _GEMMA_HEAD.begins(held) else NoCall()
            self._name, self._place = head["name"], head.end()
        while self._place < len(held):
            start = self._place + len(_GEMMA_QUOTE)
            if held.startswith(_GEMMA_QUOTE, self._place):
                end = held.find(_GEMMA_QUOTE, max(start, self._looked))
                if end < 0:
                    self._looked = len(held) - len(_GEMMA_QUOTE)
                    return None
                self._written.append(json.dumps(held[start:end], ensure_ascii=False))
                self._place = end + len(_GEMMA_QUOTE)
            elif part := _GEMMA_PART.match(held, self._place):
                self._written.append(json.dumps(part["word"]) if part["next"] == ":" else part[0])
                self._place = part.end()
                self._depth += {"{": 1, "[": 1, "]": -1, "}": -1}.get(part[0], 0)
                if not self._depth:
                    arguments = load_json("".join(self._written))
                    return WholeCall(self._name, write_json(arguments) if arguments is not None else None, self._place)
            else:
                rest = held[self._place : start]
                return None if _GEMMA_QUOTE.startswith(rest) or rest[0] not in '<"' else NoCall()
        return None


def _read_call(value: Any) -> tuple[str, str | None]:
    """Return a call's name and the JSON text of its arguments; None where it has no usable ones."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "", None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON inside of JSON
        arguments = load_json(arguments)
    return value["name"], write_json(arguments) if isinstance(arguments, dict) else None


def load_json(text: str) -> Any:
    """Return a JSON value; None where the text is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def write_json(value: JsonObject) -> str | None:
    """Return an object as JSON text; None where it is too deep, or where JSON has no such values."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # it has halves of characters: they stay escaped
        return json.dumps(value)
    except (RecursionError, ValueError):
        return None
    return text


OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
HERMES: Final = CallSyntax((OPEN,), lambda: _JsonReader(re.compile(r"<tool_call>\s*")), (CLOSE,))
_LLAMA_PREFIX = re.compile(r"(?:<\|python_tag\|>|;)?\s*")
_LLAMA_JSON = CallSyntax(
    ("<|python_tag|>",), lambda: _JsonReader(_LLAMA_PREFIX, strict=True), leading=("{",), further=(";",)
)
_LLAMA_PYTHONIC = CallSyntax(
    _PYTHON_OPENERS, _PythonReader, ("]", "<|python_end|>", "<|tool_call_end|>"), leading=("[",), further=(",",)
)
_LIST_PREFIX = re.compile(rf"(?:(?:{'|'.join(map(re.escape, LISTS))})\s*(?:\[\s*)?|,\s*)")
_JSON_LIST = CallSyntax(
    tuple(LISTS), lambda: _JsonReader(_LIST_PREFIX, strict=True), ("]", *LISTS.values()), further=(",",)
)
_MISTRAL_PREFIX = re.compile(r"(?:\[TOOL_CALLS\]\s*(?:\[\s*)?|,\s*)")
_NAMED, _BRACE = (f"(?P<name>{_NAME})",), (r"(?=\{)",)
_MISTRAL_SHAPES = [
    _Shape("[TOOL_CALLS]", (_SPACE,), _NAMED, *head, (_SPACE,), _BRACE)
    for head in (("[ARGS]",), ("[CALL_ID]", ("[a-zA-Z0-9]*",), "[ARGS]"), ())
]
_MISTRAL = CallSyntax(
    ("[TOOL_CALLS]",),
    lambda: _EitherReader(_JsonReader(_MISTRAL_PREFIX), _ShapedReader(_MISTRAL_SHAPES)),
    ("]",),
    further=(",",),
)


_DEEPSEEK_SHAPES = [
    _Shape(*opening, *head, (_SPACE,), _BRACE)
    for opening in ((_CALLS_BEGIN, (_SPACE,), _CALL_BEGIN), (_CALL_BEGIN,))
    for head in ((_NAMED, _SEPARATOR), ("function", _SEPARATOR, _NAMED, (_SPACE,), "```json"))
]
_SYNTAXES: Final[Mapping[str, CallSyntax]] = {
    "hermes": HERMES,
    "llama3_json": _LLAMA_JSON,
    "llama_pythonic": _LLAMA_PYTHONIC,
    "json_list": _JSON_LIST,
    "gemma": CallSyntax((_GEMMA_OPEN,), _GemmaReader, ("<tool_call|>",)),
    "mistral": _MISTRAL,
    "deepseek": CallSyntax(
        (_CALLS_BEGIN, _CALL_BEGIN), lambda: _ShapedReader(_DEEPSEEK_SHAPES), ("```", _CALL_END, _CALLS_END)
    ),
}


def build_syntax(form: str, schemas: Mapping[str, JsonObject]) -> CallSyntax:
    """Return the syntax of a form's calls. `schemas`: those of the arguments of the functions that are offered."""
    if form in _SYNTAXES:
        return _SYNTAXES[form]
    properties = {name: _list_properties(schema) for name, schema in schemas.items()}
    if form == "qwen3_coder":
        openers = (OPEN, _SEED_OPEN, "<function=")
        return CallSyntax(openers, lambda: _TaggedReader(_scan_qwen, properties), (CLOSE, _SEED_CLOSE))
    return CallSyntax((OPEN,), lambda: _TaggedReader(_scan_glm, properties))


def _list_properties(schema: JsonObject) -> JsonObject:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}
