"""A target's outputs on disk: files of some hundred texts each, written once and never changed.

`target.json` says what wrote them. `texts-00000.npz` and so on hold, for N texts with T tokens together of which L are
labelled, all texts one after the other:

    numbers    (N,) int64     the conversation that a text belongs to
    lengths    (N,) int32     tokens of each text
    heads      (N,) int32     leading tokens of each text that the target did not write; the others are labelled
    tokens     (T,) int32
    top_ids    (L, K) int32   the target's likeliest tokens at each labelled position, best first
    top_logs   (L, K) float16 their natural logarithms of probability, at temperature 1
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from device_profiles.whole_file import replace_file
from orchestrator.errors import OutriderError

TARGET_FILE = "target.json"


class DataError(OutriderError):
    """A step of the distillation cannot run as asked."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Who wrote the data: its source, and what its draft must share with it. `end_ids` end an answer. `prompts`: a
    digest of the prompts that somebody gave ("": none)."""

    source: str
    name: str
    vocabulary_size: int
    vocabulary_fingerprint: str
    context_length: int
    end_ids: list[int]
    prompts: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of one text, `head` of them given; `top_ids` and `top_logs` have a row for each of the others."""

    number: int
    tokens: NDArray[np.int32]
    head: int
    top_ids: NDArray[np.int32]
    top_logs: NDArray[np.float16]

    @property
    def labels(self) -> NDArray[np.int32]:
        """The target's first choice at each position that it wrote."""
        first: NDArray[np.int32] = self.top_ids[:, 0]
        return first


class Shards:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def paths(self) -> list[Path]:
        return sorted(self.directory.glob("texts-*.npz"))

    def bind(self, facts: TargetFacts) -> None:
        """Say who writes here. Raises DataError where another target did before, or over other prompts."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.directory / TARGET_FILE
        if not path.exists():
            path.write_text(json.dumps(asdict(facts), indent=1), encoding="utf-8")
        elif self.target().vocabulary_fingerprint != facts.vocabulary_fingerprint or self.target().name != facts.name:
            raise DataError(f"{path} names {self.target().name}, not {facts.name}: give another directory")
        elif self.target().prompts != facts.prompts:
            raise DataError(f"{path}: was written over other prompts: give another directory, or the same prompts")

    def target(self) -> TargetFacts:
        """Return who wrote the data. Raises DataError where there is none."""
        try:
            return TargetFacts(**json.loads((self.directory / TARGET_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            way_out = f"run `outrider drafts build --data {self.directory}` first"
            raise DataError(f"{self.directory}: there is no data ({error}); {way_out}") from error

    def add(self, texts: Sequence[Text]) -> Path:
        """Write one file more, whole or not at all."""
        path = self.directory / f"texts-{len(self.paths()):05d}.npz"
        with replace_file(path) as file:
            np.savez_compressed(
                file,
                numbers=np.array([text.number for text in texts], np.int64),
                lengths=np.array([len(text.tokens) for text in texts], np.int32),
                heads=np.array([text.head for text in texts], np.int32),
                tokens=np.concatenate([text.tokens for text in texts]),
                top_ids=np.concatenate([text.top_ids for text in texts]),
                top_logs=np.concatenate([text.top_logs for text in texts]),
            )
        return path

    def texts(self) -> Iterator[Text]:
        """Read every text. Raises DataError for a damaged file."""
        for path in self.paths():
            yield from read(path)


def read(path: Path) -> list[Text]:
    """Return the texts of one file. Raises DataError where it is damaged."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            arrays = {name: stored[name] for name in stored.files}
        ends, label_ends = np.cumsum(arrays["lengths"]), np.cumsum(arrays["lengths"] - arrays["heads"])
        texts = []
        for index, number in enumerate(arrays["numbers"]):
            length, head = int(arrays["lengths"][index]), int(arrays["heads"][index])
            own = slice(int(ends[index]) - length, int(ends[index]))
            labels = slice(int(label_ends[index]) - (length - head), int(label_ends[index]))
            texts.append(
                Text(int(number), arrays["tokens"][own], head, arrays["top_ids"][labels], arrays["top_logs"][labels])
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: it is damaged ({error}); delete it, and write more") from error
    return texts
