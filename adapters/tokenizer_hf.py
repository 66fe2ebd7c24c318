"""From the tokenizer.json of a Hugging Face directory to a tokenizer on disk.

tokenizer.json is the `tokenizers` library's own format and is taken as it is; this adds what stands in other
files: control tokens, what ends an answer, the chat template. Byte-pair encoding only, over bytes (GPT-2's
letters) or over text with byte fallback (SentencePiece style: Llama 2, Mistral, Gemma).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adapters.chat_template import ChatTemplate
from adapters.contract import ModelRefused, Progress
from adapters.decoder.hf_config import CONFIG_FILE
from adapters.hf_directory import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    IR_TOKENIZER,
    IR_TOKENIZER_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    read_json,
    read_optional_json,
    read_vocabulary_size,
    title,
)
from adapters.tokenizer_files import (
    END_OF_TURN,
    FORMAT,
    TOKENIZER_FILE,
    TokenizerMeta,
    looks_special,
    texts_by_id,
    write_meta,
)
from adapters.tokenizer_ir import IrTokenizer, read_ir_tokenizer
from device_profiles.workload import vocabulary_fingerprint


def write_hf_tokenizer(source: Path, target: Path, progress: Progress) -> None:
    progress("reading the vocabulary", 0.0)
    config = read_optional_json(source / CONFIG_FILE)
    vocabulary = _read_vocabulary(source, read_vocabulary_size(source))
    meta = _meta(source, config, vocabulary)
    progress("writing the tokenizer", 0.8)
    # A file may carry a length to cut texts to, for whoever trained with it; prompts are not to be cut.
    written = vocabulary.parsed | {"truncation": None, "padding": None}
    for token in written["added_tokens"]:
        token["special"] = token["id"] in meta.control_ids
    text = json.dumps(written, ensure_ascii=False, separators=(",", ":"))
    (target / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    write_meta(meta, _template(source), target)
    progress("writing the tokenizer", 1.0)


def read_template(source: Path) -> ChatTemplate | None:
    """Return the chat template of a model directory; None where it has none. Raises ModelRefused."""
    text = _template(source)
    named = _read_config(source)
    bos, eos = (_content(named.get(f"{role}_token")) for role in ("bos", "eos"))
    return ChatTemplate(text, bos_token=bos, eos_token=eos) if text else None


def check_tokenizer(source: Path, size: int) -> None:
    """Check a model directory's files of the tokenizer. Raises ModelRefused where `write_hf_tokenizer` would, but for
    what config.json says; `size` of the vocabulary."""
    _read_vocabulary(source, size)
    _read_config(source)
    read_optional_json(source / GENERATION_CONFIG)
    _template(source)


def vocabulary_texts(source: Path, size: int) -> list[str]:
    """Return the text of every token id of a model directory, as the model's GGUF files have them.

    Raises ModelRefused for a tokenizer of another kind, or one that does not fit a vocabulary of `size`.
    """
    return _read_vocabulary(source, size).texts


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A tokenizer.json. `texts` by id: ids without a token are filled up as [PAD7], and are the `unused` ones.
    `added`: the added tokens' ids, and whether each is a control token."""

    parsed: dict[str, Any]
    library: Any
    alphabet: Literal["bytes", "metaspace"]
    texts: list[str]
    unused: list[int]
    added: dict[int, bool]
    ids: dict[str, int]


def _read_vocabulary(source: Path, size: int) -> _Vocabulary:
    from tokenizers import Tokenizer

    where, parsed = _read_tokenizer(source)
    kind = parsed.get("model")
    kind = kind.get("type", "BPE") if isinstance(kind, dict) else None
    if kind != "BPE":
        raise ModelRefused(f"{where}: its model is {kind}; supported is BPE. Choose another model.")
    if parsed["model"].get("vocab") and not parsed["model"].get("merges"):
        # Without them every text would be single letters, which the model has hardly seen.
        raise ModelRefused(f"{where}: it has no merges, without which no text can be encoded. Choose another model.")
    try:
        # Some tokenizers name a token of the model's other half (Gemma 3: <image_soft_token>), which has no row here.
        parsed["added_tokens"] = [token for token in parsed.get("added_tokens") or [] if token["id"] < size]
        library = Tokenizer.from_str(json.dumps(parsed))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise ModelRefused(f"{where}: it is damaged ({error}). Download it again.") from error
    ids: dict[str, int] = library.get_vocab(with_added_tokens=True)
    if ids and max(ids.values()) >= size:
        raise ModelRefused(
            f"{where}: it has the token id {max(ids.values())} and the model's vocabulary has {size} tokens. "
            "The files do not belong together."
        )
    added = {
        int(index): bool(token.special) or looks_special(token.content)
        for index, token in library.get_added_tokens_decoder().items()
    }
    alphabet = _alphabet(parsed)
    spaced = {index for index, control in added.items() if not control} if alphabet == "metaspace" else set()
    texts = texts_by_id(ids, size, spaced)
    unused = sorted(set(range(size)) - set(ids.values()))
    return _Vocabulary(parsed, library, alphabet, texts, unused, added, ids)


def _read_tokenizer(source: Path) -> tuple[str, dict[str, Any]]:
    """Return what messages call a directory's tokenizer, and what tokenizer.json holds. Raises ModelRefused."""
    if own := _read_ir(source):
        return f"{title(source)}/{IR_TOKENIZER}", copy.deepcopy(own.tokenizer)
    return f"{title(source)}/{TOKENIZER_JSON}", read_json(source / TOKENIZER_JSON)


def _read_config(source: Path) -> Mapping[str, Any]:
    """Return what tokenizer_config.json says, or OpenVINO's form of it. Raises ModelRefused."""
    own = _read_ir(source)
    return own.config if own else read_optional_json(source / TOKENIZER_CONFIG)


def _read_ir(source: Path) -> IrTokenizer | None:
    """Return a directory's tokenizer in OpenVINO's form, where it has no other."""
    graph, data = (source / name for name in IR_TOKENIZER_FILES)
    if (source / TOKENIZER_JSON).exists() or not graph.exists():
        return None
    return read_ir_tokenizer(graph, data, f"{title(source)}/{IR_TOKENIZER}")


def _meta(source: Path, config: Mapping[str, Any], vocabulary: _Vocabulary) -> TokenizerMeta:
    named = _read_config(source)
    generation = read_optional_json(source / GENERATION_CONFIG)
    ids, size = vocabulary.ids, len(vocabulary.texts)
    bos = _token_id(named.get("bos_token"), ids, _ids(config.get("bos_token_id"), size))
    eos = _token_id(named.get("eos_token"), ids, _ids(config.get("eos_token_id"), size))
    ends = {*_ids(config.get("eos_token_id"), size), *_ids(generation.get("eos_token_id"), size)}
    ends |= {index for text, index in ids.items() if text in END_OF_TURN}
    ends |= set() if eos is None else {eos}
    roles = [_content(named.get(f"{role}_token")) for role in ("bos", "eos", "unk", "pad")]
    controls = {index for index, control in vocabulary.added.items() if control} | ends
    controls |= {ids[text] for text in roles if text in ids}
    return TokenizerMeta(
        format=FORMAT,
        pre=TOKENIZER_JSON,
        bos_id=bos,
        eos_id=eos,
        eos_ids=sorted(ends),
        add_bos=_adds_bos(named, vocabulary.library, bos),
        control_ids=sorted(controls),
        user_defined_ids=sorted(set(vocabulary.added) - controls),
        unused_ids=vocabulary.unused,
        vocabulary_size=size,
        vocabulary_fingerprint=vocabulary_fingerprint(vocabulary.texts),
        alphabet=vocabulary.alphabet,
    )


def _content(token: object) -> str:
    """A token in tokenizer_config.json is its text, or a mapping with it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _token_id(token: object, ids: Mapping[str, int], otherwise: list[int]) -> int | None:
    token_id = ids.get(_content(token))
    return token_id if token_id is not None else next(iter(otherwise), None)


def _ids(value: object, size: int) -> list[int]:
    """Ids as configs write them: one, several or none."""
    values = value if isinstance(value, list) else [value]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size]


def _adds_bos(named: Mapping[str, Any], library: Any, bos: int | None) -> bool:
    if isinstance(named.get("add_bos_token"), bool):
        return bool(named["add_bos_token"])
    return bos is not None and bool(library.encode("a").ids[:1] == [bos])


def _alphabet(parsed: Mapping[str, Any]) -> Literal["bytes", "metaspace"]:
    decoder = parsed.get("decoder") or {}
    parts = [decoder, *(decoder.get("decoders") or [])]
    return "bytes" if any(part.get("type") == "ByteLevel" for part in parts) else "metaspace"


def _template(source: Path) -> str | None:
    """Return the chat template: a file of its own, else the text in tokenizer_config.json (the one called
    "default" where there are several)."""
    own = source / CHAT_TEMPLATE
    if own.is_file():
        try:
            return own.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelRefused(f"{title(source)}/{CHAT_TEMPLATE}: cannot be read ({error})") from error
    template = _read_config(source).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
