"""Writes docs/models.md of the models that the tests load, and of what each runtime says of the others.

python -m tests.support.models_page
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from gguf import MODEL_ARCH_NAMES

from adapters.contract import ModelRefused
from adapters.model_checks import check_files
from adapters.model_source import check_source
from adapters.names import OWN_ADAPTERS
from tests.support.model_rows import NAMES, ROWS, SAMPLES, simplify
from tests.support.tiny_gguf import Tiny, write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
RUNTIMES = sorted(name for name in OWN_ADAPTERS if name != "simulated")
_MARK = "@loads_models("
_TESTED, _EXPECTED, _REFUSED = "tested", "expected", "refused"
_HEAD = f"""# Models

Made by the tests, by `python -m tests.support.models_page`: a test fails where this page is out of date.
`outrider models check SOURCE` says the same of one model, on this machine, with its memory and the lines to paste.

- **{_TESTED}**: a test loads a small random model of this architecture there, runs it, and compares what comes out.
- **{_EXPECTED}**: what its files say is accepted there, and no test loads one.
- **{_REFUSED}**: with [the reason](#why), in the words of the load. Beside "{_TESTED}": some models are.
- A quantised form behind "safetensors": on a processor ([the others](configuration.md#any-decoder-of-transformers)).
- Nothing: no test has such files, so that it is not known.

Architectures are spelt as `general.architecture` of GGUF files and as the class in config.json
(mixtral: `llama` with experts).
A package in brackets is needed beside the runtime: ik_llama.cpp does not run these, and mainline llama.cpp does
(`pip install xllamacpp`).
"""


def collect_rows() -> None:
    """Import each module with tests that load models, so that `model_rows` knows of them."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(rf"^{re.escape(_MARK)}", path.read_text(encoding="utf-8"), re.MULTILINE):
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


class _Table:
    """The cells of the table; the small models are written into a directory, each once. `reasons`: of refusals, by
    their numbers from 1."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[Path, Path] = {}
        self.reasons: list[str] = []

    def describe_cell(self, architecture: str, form: str, runtime: str) -> str:
        """Return what is known of an architecture in files of this form on a runtime."""
        rows = [row for row in ROWS if (row.architecture, row.form, row.runtime) == (architecture, form, runtime)]
        needs = "" if any(not row.needs for row in rows) else ", ".join(sorted({row.needs for row in rows}))
        words = [f"{_TESTED} ({needs})" if needs else _TESTED] if rows else []
        refusals = list(dict.fromkeys(self._list_refusals(architecture, form, runtime)))
        if not words and "" in refusals:
            words = [_EXPECTED]
        return ", ".join(words + [self._number(text) for text in refusals if text])

    def _number(self, text: str) -> str:
        if text not in self.reasons:
            self.reasons.append(text)
        return f"{_REFUSED} [{self.reasons.index(text) + 1}](#why)"

    def _list_refusals(self, architecture: str, form: str, runtime: str) -> Iterator[str]:
        """Yield what the runtime says of each small model, "" where it would load it."""
        for name, write_sample in SAMPLES.get((architecture, form), {}).items():
            place = self._directory / f"{form} {name}"
            if place not in self._written:
                place.mkdir()
                self._written[place] = write_sample(place, name)
            source = self._written[place]
            try:
                check_source(str(source), self._directory, runtime)
            except ModelRefused as error:
                yield _generalise(str(error), source, architecture)
            else:
                yield ""


def write_models_page() -> str:
    """Return docs/models.md."""
    collect_rows()
    columns = ["architecture", "files", *RUNTIMES]
    lines = [_HEAD, _count_tested(), "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    with TemporaryDirectory() as directory:
        table = _Table(Path(directory))
        for architecture, form in sorted({(row.architecture, row.form) for row in ROWS}):
            cells = [table.describe_cell(architecture, form, runtime) for runtime in RUNTIMES]
            lines.append(f"| {NAMES[architecture, form]} | {form} | {' | '.join(cells)} |")
        expected, others = _ask_of_others(Path(directory))
    lines += ["", "## Why", "", *(f"{number}. {text}" for number, text in enumerate(table.reasons, 1))]
    lines += [
        "",
        "## Architectures of llama.cpp that no test loads",
        "",
        f"llama.cpp's own list (gguf {version('gguf')}) has these beside the tested ones. As GGUF files they are",
        f"{_EXPECTED} on `llama_cpp`, where its library knows them:",
        "",
        f"{', '.join(expected)}.",
        "",
        f"These are {_REFUSED}, as no decoders of text:",
        "",
    ]
    lines += [f"- {', '.join(names)}: {why}" for why, names in sorted(others.items())]
    return "\n".join(lines) + "\n"


def _count_tested() -> str:
    runtimes: dict[str, set[str]] = {}
    for row in ROWS:
        runtimes.setdefault(row.architecture, set()).add(row.runtime)
    several = sum(len(names) >= 3 for names in runtimes.values())
    return f"{len(runtimes)} architectures are tested in a runtime, {several} of them in at least three."


def _generalise(text: str, source: Path, architecture: str) -> str:
    """Return a refusal without what is this model's alone."""
    text = text.replace(str(source), "the source").replace(source.name, "the file")
    text = re.sub(r"^(?:the source|the file)(?:/[^:]*)?: ", "", text)
    return re.sub(r"'([\w.-]+)'", lambda match: "it" if simplify(match[1]) == architecture else match[0], text)


def _ask_of_others(directory: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return the architectures of llama.cpp's list that no test loads and that are taken, and those that are refused,
    by the reason."""
    tested = {row.architecture for row in ROWS if row.form.startswith("GGUF")}
    expected: list[str] = []
    refused: dict[str, list[str]] = {}
    for name in sorted(set(MODEL_ARCH_NAMES.values())):
        if simplify(name) in tested:
            continue
        path = directory / "m.gguf"
        write(path, Tiny(name, layers=1, hidden=32, heads=1, kv_heads=1, mlp=32, words=("a", "b", "ab"), vocabulary=3))
        try:
            check_files(path, adapter="")
        except ModelRefused as error:
            why = str(error).partition(f"'{name}': ")[2] or str(error)
            refused.setdefault(why.partition(". ")[0], []).append(name)
        else:
            expected.append(name)
    return expected, refused


if __name__ == "__main__":
    PAGE.write_text(write_models_page(), encoding="utf-8")
