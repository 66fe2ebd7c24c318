"""Checks the words of the project: functions are named by verbs, names say what they hold, and sentences are short.

Three limits hold. No function may be named by a past form ("decided", "told"), properties and pytest fixtures excepted.
The names that docs/adr/0113 is ending may become fewer, never more: `_LIMITS` holds how many there are.
At most 1 % of the sentences may have more than 30 words. They are taken from the documentation (ADRs excepted), from
docstrings and from the help of commands. Fenced code does not count. A cell of a table counts as a text of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

CODE = ("adapters", "device_profiles", "orchestrator", "policies", "tests", "tools")
PROSE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md")
MOST_WORDS = 30
MOST_SHARE = 0.01
WORST = 10
_SHOWN_WORDS = 12

_BASE_WORDS = "bed bleed breed embed exceed feed heed need proceed red relent seed shed shred speed succeed"
_IRREGULAR_WORDS = """
been begun bent bitten blown bought broken brought built burnt caught chosen clung dealt done drawn driven drunk eaten
fallen fed felt flown forbidden forgiven forgotten fought found frozen given gone grown heard held hidden hung kept
known laid learnt led left lent lit lost made meant met paid proven ridden risen said seen sent sewn shaken shot shown
shrunk slept sold sought spelt spent spoken sprung spun stolen stood struck stuck swept sworn swum taken taught thought
thrown told torn understood wept won worn woven written
began broke came chose drew drove gave grew knew ran rose spoke took threw went wore wrote
"""
"""Words that are base forms too ("cut", "put", "set", "split", "read", "bound") are not among them."""
_BASE_FORMS, _IRREGULAR = frozenset(_BASE_WORDS.split()), frozenset(_IRREGULAR_WORDS.split())
_PREFIX = re.compile(r"(?:un|re|over|out|under|with|fore|mis)(?=[a-z]{3})")
_EXCEPT = frozenset({"property", "cached_property", "setter", "deleter", "fixture"})

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)[\"')*_]*\s+(?=[\"'(*_\[`]*[A-Z0-9`$-])")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)]|#+|>)\s+")


VAGUE_NAMES = frozenset({"asked", "begun", "found", "one", "said", "there", "told"})
"""Of locals, parameters and fields: each has a noun of its own."""
REPLACED_WORDS = ("arm", "arms", "devices_there", "door", "doors", "lane", "lanes", "least_tokens", "paid_rows")
"""Words of names that others stand for: variant, device_check, endpoint, min_tokens, min_rows."""
MOST_DEFINITIONS = 8
"""Of a public method's name without a noun ("describe"), in classes of the product and of the tools."""
LOOSE_SHARE = 0.05
"""A limit this far above its count is to be lowered."""
_LIMITS = """
bindings: asked 8 begun 13 found 12 one 1 said 4 there 1 told 7
bindings beside: asked 182 begun 27 found 579 one 1230 said 91 there 23 told 277
words: arm 2 arms 7 lane 6 lanes 7 paid_rows 1
words beside: arm 29 arms 12 door 59 doors 4 lane 7 lanes 4 paid_rows 1
methods: advance 11 attach 16 begin 26 choose 12 classes 14 describe 16 devices 10 discard 14 end 32
methods: extend 22 find 13 fork 11 forward 22 generate 11 heal 12 hold 11 inject 16 keep 10 observe 10 of 19
methods: prepare 23 propose 15 recipe 13 release 19 share 12 states 15 take 10 tell 10
methods: view 20
"""
"""What `count_names` counts at most, by group. To be lowered with each count, never raised."""
_LIBRARY_WORDS = "add cancel close load open pop push read run send start stop submit write"
"""Everybody knows them from sets, files, threads and tasks: they need no noun."""
_LIBRARY_METHODS = frozenset(_LIBRARY_WORDS.split())
_METHOD_EXCEPT = frozenset({"overload", *_EXCEPT})
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that breaks a rule: a function's name, or the first words of a sentence and how many it has."""

    place: str
    text: str
    words: int = 0


def is_past_form(name: str) -> bool:
    word = name.strip("_").partition("_")[0]
    stem = _PREFIX.sub("", word, count=1)
    if word in _BASE_FORMS or stem in _BASE_FORMS:
        return False
    return (word.endswith("ed") and len(word) > 3) or word in _IRREGULAR or stem in _IRREGULAR


def list_decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the last name of each decorator of a function, without its arguments."""
    return [ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in function.decorator_list]


def find_past_forms(tree: ast.Module, name: str) -> Iterator[Finding]:
    """Yield the functions of a module that are named by a past form."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not is_past_form(node.name):
            continue
        if _EXCEPT.isdisjoint(list_decorators(node)):
            yield Finding(f"{name}:{node.lineno}", node.name)


def list_bindings(tree: ast.Module) -> Iterator[str]:
    """Yield each name that a module binds, per place: locals, parameters, fields, and what it defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case _:
                pass


def list_methods(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each public method of one word, per class, without properties and the library's words."""
    for node in ast.walk(tree):
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or "_" in method.name:
                continue
            if method.name not in _LIBRARY_METHODS and _METHOD_EXCEPT.isdisjoint(list_decorators(method)):
                yield method.name


def count_names(root: Path) -> dict[str, Counter[str]]:
    """Return how often each name that is limited occurs, by group: `bindings` and `words` of the product, the same
    `beside` it (tests and tools), and `methods` (all but tests)."""
    counts = {group: Counter[str]() for group in ("bindings", "bindings beside", "words", "words beside", "methods")}
    for room in CODE:
        beside = " beside" if room in ("tests", "tools") else ""
        for path in (root / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name in list_bindings(tree):
                counts[f"bindings{beside}"].update(VAGUE_NAMES & {name.strip("_")})
                padded = f"_{_CAMEL.sub('_', name).lower()}_"
                counts[f"words{beside}"].update(word for word in REPLACED_WORDS if f"_{word}_" in padded)
            if "tests" not in path.relative_to(root).parts:
                counts["methods"].update(list_methods(tree))
    counts["methods"] = Counter({name: count for name, count in counts["methods"].items() if count > MOST_DEFINITIONS})
    return counts


def read_limits(text: str) -> dict[str, dict[str, int]]:
    """Return the limit of each name, by group, of lines like `_LIMITS`."""
    limits: dict[str, dict[str, int]] = {}
    for line in text.strip().splitlines():
        group, _, row = line.partition(":")
        words = row.split()
        limits.setdefault(group, {}).update(zip(words[::2], map(int, words[1::2]), strict=True))
    return limits


def compare_names(
    counts: dict[str, Counter[str]], all_limits: dict[str, dict[str, int]]
) -> tuple[list[str], list[str]]:
    """Return what is above its limit, and which limits are too loose, one line each."""
    above, loose = list[str](), list[str]()
    for group, names in counts.items():
        limits = all_limits.get(group, {})
        for name in sorted(names | limits.keys()):
            count, limit = names[name], limits.get(name, MOST_DEFINITIONS if group == "methods" else 0)
            if count > limit:
                above.append(
                    f"{group}: `{name}` stands {count} times (limit {limit}); give the new ones their own noun"
                )
            elif count < limit * (1 - LOOSE_SHARE):
                loose.append(
                    f"{group}: `{name}` stands {count} times: lower its limit of {limit} in {Path(__file__).name}"
                )
    return above, loose


def list_code_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring and every help of a command."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            texts = [node.value]
        elif isinstance(node, ast.Call):
            texts = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
        else:
            continue
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.lineno, text.value


def split_blocks(text: str, *, markdown: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph, item, heading and cell. Code is left out."""
    start, lines, fenced, is_heading = 0, list[str](), False, False
    indent = "" if markdown else " " * 4
    rows = text.split("\n")
    margin = min((len(row) - len(row.lstrip()) for row in rows[1:] if row.strip()), default=0)
    for number, row in enumerate([*rows, ""]):
        line = row if markdown or not number else row[margin:]
        fence = line.lstrip().startswith("```")
        is_table = line.lstrip().startswith("|")
        is_code = fence or fenced or bool(indent and line.startswith(indent))
        if lines and (not line.strip() or is_code or is_table or is_heading or _ITEM.match(line)):
            yield start, "\n".join(lines)
            lines = []
        is_heading = line.startswith("#")
        fenced ^= fence
        if is_table and not is_code:
            yield from ((number, cell) for cell in line.split("|") if cell.strip(" :-"))
        elif line.strip() and not is_code:
            start = start if lines else number
            lines.append(line[item.end() :] if (item := _ITEM.match(line)) else line)


def split_sentences(text: str, *, markdown: bool) -> Iterator[tuple[int, str]]:
    """Yield the line (from 0) and the text of each sentence. A blank line ends one too."""
    for line, block in split_blocks(text, markdown=markdown):
        begin = 0
        for end in [*_SENTENCE_END.finditer(block), None]:
            yield line + block.count("\n", 0, begin), block[begin : end.start() if end else len(block)]
            begin = end.end() if end else begin


def count_words(sentence: str) -> int:
    """Return the words of a sentence: of a link its text, of inline code each word."""
    return sum(any(letter.isalnum() for letter in word) for word in _LINK.sub(r"\1", sentence).split())


def check(root: Path) -> tuple[list[Finding], list[Finding]]:
    """Return the functions named by a past form, and all sentences with their words."""
    functions, sentences = list[Finding](), list[Finding]()

    def add(name: str, first: int, text: str, *, markdown: bool) -> None:
        for line, sentence in split_sentences(text, markdown=markdown):
            if words := count_words(sentence):
                start = " ".join(sentence.split()[:_SHOWN_WORDS])
                sentences.append(Finding(f"{name}:{first + line}", start, words))

    for path in sorted(path for room in CODE for path in (root / room).rglob("*.py")):
        name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        functions += find_past_forms(tree, name)
        for first, text in list_code_texts(tree):
            add(name, first, text, markdown=False)
    for path in sorted(path for pattern in PROSE for path in root.glob(pattern)):
        add(path.relative_to(root).as_posix(), 1, path.read_text(encoding="utf-8"), markdown=True)
    return functions, sentences


def main() -> int:
    """Print what breaks a limit; return 1 where one is broken."""
    parser = argparse.ArgumentParser(description="Check names of functions and lengths of sentences.")
    parser.add_argument("--json", type=Path, metavar="OUT", help="Write the figures to this file too.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="Check this tree.")
    arguments = parser.parse_args()
    functions, sentences = check(arguments.root)
    counts = count_names(arguments.root)
    above, loose = compare_names(counts, read_limits(_LIMITS))
    too_long = sorted(
        (sentence for sentence in sentences if sentence.words > MOST_WORDS),
        key=lambda sentence: (-sentence.words, sentence.place),
    )
    share = len(too_long) / max(1, len(sentences))
    for function in functions:
        print(f"{function.place}: {function.text} is a past form; name the function by a verb")
    print(f"{len(functions)} functions are named by past forms (limit 0)")
    for line in (*above, *loose):
        print(line)
    print(
        ", ".join(f"{group} {sum(names.values())}" for group, names in counts.items()), f"({len(above)} above limits)"
    )
    for sentence in too_long[:WORST]:
        print(f"{sentence.place}: {sentence.words} words: {sentence.text} ...")
    lengths = f"{len(too_long)} of {len(sentences)} sentences have over {MOST_WORDS} words"
    print(f"{lengths}: {share:.2%} (limit {MOST_SHARE:.0%})")
    if arguments.json is not None:
        figures = {
            "functions": [asdict(function) for function in functions],
            "names": counts,
            "sentences": len(sentences),
            "long_sentences": [asdict(sentence) for sentence in too_long],
            "long_share": share,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if functions or above or share > MOST_SHARE else 0


if __name__ == "__main__":
    sys.exit(main())
