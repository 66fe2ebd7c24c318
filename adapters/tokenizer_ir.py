"""A tokenizer in OpenVINO's form as the files of a Hugging Face directory, which other code reads.

openvino_genai writes such a tokenizer of a GGUF file, and no other: `openvino_tokenizer.xml` is a graph of operations
on strings (openvino_tokenizers). Its constants are the vocabulary, the merges and the regular expressions that cut
text; what ends an answer and the chat template stand behind the graph. Byte-level BPE only, which is all that
openvino_genai reads.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from adapters.content_digest import full_identity
from adapters.contract import ModelRefused
from adapters.token_texts import byte_alphabet
from adapters.tokenizer_cuts import Cut
from adapters.tokenizer_files import END_OF_TURN, looks_special

_RAGGED: Final = 5  # inputs of the text itself: begins and ends of rows and of pieces, and bytes
_STRINGS: Final = 3  # inputs of a list of strings: begins, ends, bytes
_INDICES: Final = _RAGGED + 4 * _STRINGS
"""Behind vocabulary, left and right halves of merges, and added tokens: the ids of these."""
_KINDS: Final[dict[str, type[np.generic]]] = {"i32": np.int32, "i64": np.int64, "u8": np.uint8}


@dataclass(frozen=True, slots=True)
class IrTokenizer:
    """`tokenizer`: what tokenizer.json would hold; `config`: what tokenizer_config.json would."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]


def read_ir_tokenizer(graph: Path, data: Path, where: str) -> IrTokenizer:
    """Return a tokenizer in OpenVINO's form, of which `data` has the constants. `where`: what messages call it. Raises
    ModelRefused where it is damaged, or of another kind."""
    try:
        identity = (*full_identity(graph), *full_identity(data))
        return _read(graph, data, identity)
    except OSError as error:
        raise ModelRefused(f"{where}: cannot be read ({error.strerror or error})") from error
    except (ElementTree.ParseError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise ModelRefused(
            f"{where}: it is no byte-level BPE as openvino_genai writes it ({error}). "
            "Put the model's tokenizer.json and tokenizer_config.json beside it."
        ) from error


@lru_cache(maxsize=4)  # a start asks several times, and 150,000 tokens take a second
def _read(graph: Path, data: Path, identity: tuple[int, ...]) -> IrTokenizer:
    del identity  # of the key alone
    reader = _Reader(ElementTree.parse(graph).getroot(), data)  # noqa: S314  # expat bounds what entities grow to
    (bpe,) = reader.list_nodes("BPETokenizer")
    at = [_RAGGED + _STRINGS * part for part in range(4)]
    vocabulary, left, right = (reader.read_strings(bpe, place) for place in at[:3])
    added = dict(zip(reader.read_array(bpe, _INDICES).tolist(), reader.read_strings(bpe, at[3]), strict=True))
    letters = {value: letter for letter, value in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    texts = [added[index].decode() if index in added else spell(token) for index, token in enumerate(vocabulary)]
    merges = list(zip(map(spell, left), map(spell, right), strict=True))
    cuts = tuple(reader.read_pattern(node) for node in reader.list_nodes("RegexSplit"))
    facts = reader.facts
    bos, eos = (_find_text(facts.get(f"{role}_token_id"), texts) for role in ("bos", "eos"))
    config = {"bos_token": bos, "eos_token": eos, "chat_template": facts.get("chat_template")}
    return IrTokenizer(_build(texts, merges, cuts, sorted(added), {bos, eos}), config)


def _build(
    texts: list[str], merges: list[tuple[str, str]], cuts: tuple[str, ...], added: list[int], roles: set[str | None]
) -> dict[str, Any]:
    """Return what tokenizer.json would hold. `added`: ids that are found in a text before it is cut. What looks like a
    control token among them is one: the graph does not tell these from other added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    library = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    library.pre_tokenizer = Cut("", cuts, whole_words=False, adds_bos=False, composes=False).build()
    library.decoder = decoders.ByteLevel()
    library.add_tokens(
        [
            AddedToken(text, special=looks_special(text) or text in roles or text in END_OF_TURN, normalized=False)
            for text in (texts[index] for index in added)
        ]
    )
    written: dict[str, Any] = json.loads(library.to_str())
    return written


def _find_text(index: str | None, texts: list[str]) -> str | None:
    """Return the token of an id, as the graph's facts have it; None where there is none."""
    return texts[int(index)] if index is not None and 0 <= int(index) < len(texts) else None


class _Reader:
    """The nodes of a graph, and the constants that they read. Its methods raise ValueError, KeyError, IndexError,
    AttributeError and TypeError for what is no such graph, and OSError."""

    def __init__(self, root: Any, data: Path) -> None:
        self._data = data
        self._layers = {layer.get("id"): layer for layer in root.iter("layer")}
        self._inputs: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        for edge in root.iter("edge"):
            self._inputs[edge.get("to-layer")][int(edge.get("to-port"))] = self._layers[edge.get("from-layer")]
        self.facts = {fact.tag: fact.get("value") for fact in root.find("rt_info")}

    def list_nodes(self, kind: str) -> list[Any]:
        """Return the nodes of a type, in the order in which they run: an IR lists them so."""
        return [layer for layer in self._layers.values() if layer.get("type") == kind]

    def read_array(self, node: Any, port: int) -> NDArray[Any]:
        """Return the constant that a node reads at a port."""
        data = self._inputs[node.get("id")][port].find("data")
        kind = np.dtype(_KINDS[data.get("element_type")])
        count = int(data.get("size")) // kind.itemsize
        return np.fromfile(self._data, kind, count, offset=int(data.get("offset")))

    def read_strings(self, node: Any, port: int) -> list[bytes]:
        """Return the list of strings that a node reads at a port and the two behind it."""
        begins, ends, letters = (self.read_array(node, port + part) for part in range(_STRINGS))
        whole = letters.tobytes()
        return [whole[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def read_pattern(self, node: Any) -> str:
        """Return the regular expression that a node cuts text by, each match a piece of its own."""
        if (how := node.find("data").get("behaviour")) != "isolate":
            raise ValueError(f"it cuts text by {how!r}")
        return self.read_array(node, _RAGGED + 1).tobytes().decode()
