"""Checks the words of the project: functions are named by verbs, and sentences are short.

Two limits hold. No function may be named by a past form ("decided", "told"), properties and pytest fixtures excepted.
At most 1 % of the sentences may have more than 30 words. They are taken from the documentation (ADRs excepted), from
docstrings and from the help of commands. Fenced code does not count. A cell of a table counts as a text of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
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
_EXCEPT = ("property", "cached_property", "setter", "deleter", "fixture")

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)[\"')*_]*\s+(?=[\"'(*_\[`]*[A-Z0-9`$-])")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)]|#+|>)\s+")


@dataclass(frozen=True, slots=True)
class Finding:
    """A place that breaks a rule: a function's name, or the first words of a sentence and how many it has."""

    place: str
    text: str
    words: int = 0


def is_past_form(name: str) -> bool:
    """Return whether the first word of a name is a past form."""
    word = name.strip("_").partition("_")[0]
    stem = _PREFIX.sub("", word, count=1)
    if word in _BASE_FORMS or stem in _BASE_FORMS:
        return False
    return (word.endswith("ed") and len(word) > 3) or word in _IRREGULAR or stem in _IRREGULAR


def find_past_forms(tree: ast.Module, name: str) -> Iterator[Finding]:
    """Yield the functions of a module that are named by a past form."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not is_past_form(node.name):
            continue
        decorators = [ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list]
        if not any(one in _EXCEPT for one in decorators):
            yield Finding(f"{name}:{node.lineno}", node.name)


def list_code_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring and every help of a command."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            texts = [node.value]
        elif isinstance(node, ast.Call):
            texts = [one.value for one in node.keywords if one.arg == "help"]
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

    for path in sorted(one for room in CODE for one in (root / room).rglob("*.py")):
        name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        functions += find_past_forms(tree, name)
        for first, text in list_code_texts(tree):
            add(name, first, text, markdown=False)
    for path in sorted(one for pattern in PROSE for one in root.glob(pattern)):
        add(path.relative_to(root).as_posix(), 1, path.read_text(encoding="utf-8"), markdown=True)
    return functions, sentences


def main() -> int:
    """Print what breaks a limit; return 1 where one is broken."""
    parser = argparse.ArgumentParser(description="Check names of functions and lengths of sentences.")
    parser.add_argument("--json", type=Path, metavar="OUT", help="Write the figures to this file too.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="Check this tree.")
    arguments = parser.parse_args()
    functions, sentences = check(arguments.root)
    too_long = sorted((one for one in sentences if one.words > MOST_WORDS), key=lambda one: (-one.words, one.place))
    share = len(too_long) / max(1, len(sentences))
    for one in functions:
        print(f"{one.place}: {one.text} is a past form; name the function by a verb")
    print(f"{len(functions)} functions are named by past forms (limit 0)")
    for one in too_long[:WORST]:
        print(f"{one.place}: {one.words} words: {one.text} ...")
    counts = f"{len(too_long)} of {len(sentences)} sentences have over {MOST_WORDS} words"
    print(f"{counts}: {share:.2%} (limit {MOST_SHARE:.0%})")
    if arguments.json is not None:
        figures = {
            "functions": [asdict(one) for one in functions],
            "sentences": len(sentences),
            "long_sentences": [asdict(one) for one in too_long],
            "long_share": share,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if functions or share > MOST_SHARE else 0


if __name__ == "__main__":
    sys.exit(main())
