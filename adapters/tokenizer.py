"""Text to token ids and back; back by what bytes each id stands for (see `token_texts`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from adapters.chat_template import ChatTemplate, Message, TemplateError, guard_messages
from adapters.contract import ModelRefused, Unsupported
from adapters.fill_tokens import FillTokens, find_fill_tokens
from adapters.min_tokens import MinTokens, measure_min_tokens
from adapters.output_form import find_idle_keywords, mentions_tools
from adapters.token_texts import ControlTokens, TokenTextDecoder, join_bytes, list_token_bytes
from adapters.tokenizer_files import (
    FORMAT,
    META_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TokenizerMeta,
    texts_by_id,
)
from device_profiles.workload import vocabulary_fingerprint

__all__ = ["Message", "TemplateError", "Tokenizer"]

_AT_BEGINNING, _NOWHERE = '"prepend_scheme":"first"', '"prepend_scheme":"never"'
_Breaker = tuple[tuple[int, ...], tuple[int, ...]]  # as policies.sampling.params has it
_MOST_TAIL = 20  # llama.cpp's bound of a breaker behind its first token
_MOST_BREAKERS = 64  # texts whose breakers are kept. Not tuned: four times those of a request.
_BYTE_VOCABULARY_SIZE = 272  # the simulated model's: bytes and 16 control tokens
_BYTE_CONTROLS = {256: "<|end|>", 257: "<|start|>"}
_BYTE_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """`pieces`: the bytes of each token in id order (b"" for one that stands for nothing). `controls`: the control
    tokens. The encoders turn plain text into ids and know no control tokens:

    - `encode`: text at the very beginning.
    - `encode_inner`: text that does not stand there (some vocabularies put a space before a beginning).
    - `encode_behind`: text that continues other text (some put a space before every text).

    `least`: bounds their number of tokens from below; None where that cannot be done. `encode_whole`: knows
    control tokens, too; it is there where the library looks for them in normalised text. `fill`: marks the parts of a
    text whose middle is to be written.
    """

    pieces: list[bytes]
    controls: ControlTokens
    encode: Callable[[str], list[int]]
    encode_inner: Callable[[str], list[int]]
    encode_behind: Callable[[str], list[int]]
    eos_ids: frozenset[int]
    eos_id: int | None
    bos_id: int | None
    add_bos: bool
    least: MinTokens | None
    encode_whole: Callable[[str], list[int]] | None = None
    fill: FillTokens | None = None


class Tokenizer:
    """A model's tokenizer and chat template. Threads may share it."""

    def __init__(self, vocabulary: _Vocabulary, template: ChatTemplate | None) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._breakers: dict[str, tuple[_Breaker, ...]] = {}
        self._run_by: Callable[[ChatTemplate], ChatTemplate] = _run_here
        self.configured_form: str | None = None
        self.eos_ids, self.vocabulary_size = vocabulary.eos_ids, len(vocabulary.pieces)
        self.bos_id, self.adds_bos = vocabulary.bos_id, vocabulary.add_bos
        self.control_ids = hidden = frozenset(vocabulary.controls.ids.values())
        self._shown = [b"" if index in hidden else piece for index, piece in enumerate(vocabulary.pieces)]
        self._controls = vocabulary.controls.pattern

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load what `TokenizerRecipe` wrote. Raises ModelRefused when it is not there or damaged."""
        from tokenizers import Tokenizer as Library

        # Texts are encoded one at a time: the library's own threads would be of no use. Read at its first batch.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            meta = TokenizerMeta(**json.loads((directory / META_FILE).read_text(encoding="utf-8")))
            if meta.format != FORMAT:
                raise ModelRefused(f"{directory}: tokenizer format {meta.format} is not {FORMAT}; prepare again")
            written = (directory / TOKENIZER_FILE).read_text(encoding="utf-8")
            parsed, library = msgspec.json.decode(written), Library.from_str(written)
            texts = _texts_by_id(parsed, library, meta)
            controls = _control_tokens(parsed, texts, meta)
            if controls.strips:
                written = _without_added(parsed, controls.found_plain)
                library = Library.from_str(written)
            unled = written.replace(_AT_BEGINNING, _NOWHERE)
            inner = library if unled == written else Library.from_str(unled)
            bare = _without_prefix(unled)
            behind = inner if bare is None else Library.from_str(bare)
            source = directory / TEMPLATE_FILE
            template = source.read_bytes().decode() if source.exists() else None
        except ModelRefused:
            raise
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise ModelRefused(f"{directory}: the prepared tokenizer is damaged ({error}); prepare it again") from error
        pieces = list_token_bytes(texts, meta)
        vocabulary = _Vocabulary(
            pieces=pieces,
            controls=controls,
            encode=_plain_encoder(library),
            encode_inner=_plain_encoder(inner),
            encode_behind=_plain_encoder(behind),
            eos_ids=frozenset(meta.eos_ids),
            eos_id=meta.eos_id,
            bos_id=meta.bos_id,
            add_bos=meta.add_bos and meta.bos_id is not None,
            least=measure_min_tokens(parsed, pieces),
            encode_whole=_whole_encoder(Library, parsed, meta),
            fill=find_fill_tokens(texts, meta.fill_ids),
        )
        if template is None:
            return cls(vocabulary, None)
        bos, eos = ("" if index is None else texts[index] for index in (meta.bos_id, meta.eos_id))
        return cls(vocabulary, ChatTemplate(template, bos_token=bos, eos_token=eos))

    @classmethod
    def bytes_only(cls) -> Tokenizer:
        """Return the toy tokenizer, which needs no files. Ids 0..255 are bytes, 256 is <|end|> (the eos) and 257 is
        <|start|>. The rest up to a vocabulary of 272 is unused."""
        blank = _BYTE_VOCABULARY_SIZE - 256 - len(_BYTE_CONTROLS)
        pieces = [bytes([value]) for value in range(256)]
        pieces += [text.encode() for text in _BYTE_CONTROLS.values()] + [b""] * blank
        vocabulary = _Vocabulary(
            pieces=pieces,
            controls=ControlTokens({text: index for index, text in _BYTE_CONTROLS.items()}),
            encode=lambda text: list(text.encode()),
            encode_inner=lambda text: list(text.encode()),
            encode_behind=lambda text: list(text.encode()),
            eos_ids=frozenset({256}),
            eos_id=256,
            bos_id=None,
            add_bos=False,
            least=MinTokens(pieces),
        )
        return cls(vocabulary, ChatTemplate(_BYTE_TEMPLATE, bos_token="", eos_token=_BYTE_CONTROLS[256]))

    def render_by(self, replace: Callable[[ChatTemplate], ChatTemplate]) -> None:
        """Let another template stand for the model's own, where it has one, and for each that a request brings: as one
        that is run elsewhere."""
        self._run_by = replace
        self._template = None if self._template is None else replace(self._template)

    def with_template(self, source: str) -> Tokenizer:
        """Return this tokenizer with another chat template, which is run as the model's own is."""
        texts = self._begin_and_end()
        other = copy(self)
        other._template = self._run_by(ChatTemplate(source, bos_token=texts[0] or "", eos_token=texts[1] or ""))
        other.__dict__["template_fault"] = ""  # a fault of it is the request's
        return other

    @property
    def output_form(self) -> str | None:
        """The form of thoughts and calls in answers: the one that is configured, or that the chat template shows."""
        return self.configured_form or (None if self._template is None else self._template.output_form)

    def template_shows(self, text: str) -> bool:
        """Whether this stands in the chat template."""
        return self._template is not None and text in self._template.source

    def find_control(self, text: str) -> int | None:
        """Return the control token that is written so; None where there is none."""
        return self._vocabulary.controls.ids.get(text)

    def _begin_and_end(self) -> list[str | None]:
        """Return the texts of the tokens that begin and end a text, where the model has them."""
        vocabulary = self._vocabulary
        return [
            None if index is None else self.decode([index], skip_special=False)
            for index in (vocabulary.bos_id, vocabulary.eos_id)
        ]

    def describe(self) -> dict[str, Any]:
        """Return what a tokenizer_config.json of Hugging Face's says: the texts of special tokens, and the template."""
        vocabulary = self._vocabulary
        texts = {index: text for text, index in sorted(vocabulary.controls.ids.items(), key=lambda item: item[1])}
        bos, eos = self._begin_and_end()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": vocabulary.add_bos,
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": None,
            "unk_token": None,
            "additional_special_tokens": list(texts.values()),
            "added_tokens_decoder": {str(index): text for index, text in texts.items()},
            "clean_up_tokenization_spaces": False,
            "chat_template": None if self._template is None else self._template.source,
        }

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` and `encode_chat` can work."""
        return self._template is not None

    @cached_property
    def template_fault(self) -> str:
        """Why the chat template is of no use for a plain chat; "" where it is, or where there is none. It is tried
        until that is found out. Raises TemplateEnded where it was ended this time."""
        return "" if self._template is None else self._template.find_fault()

    def count_min_tokens(self, text: str, enough: int) -> int:
        """Return a number of tokens that `text` has at the least, without encoding it; more than `enough` is not
        counted. 0 where nothing can be said."""
        least = self._vocabulary.least
        return 0 if least is None else least.count(text, enough)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of `text`, without adding any.

        With `special`, control tokens written in the text (<|im_start|>) become those tokens; without it they
        are plain text. Lone surrogates, which no UTF-8 text can hold, count as U+FFFD.
        """
        text = _well_formed(text)
        if special or self._vocabulary.controls.strips:
            return self._split_and_encode(text, guard="", special=special)
        return self._vocabulary.encode(text)

    def encode_behind(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of text that continues other text: as `encode`, and nothing is put before it."""
        text, behind = _well_formed(text), self._vocabulary.encode_behind
        if not special and not self._vocabulary.controls.strips:
            return behind(text)
        ids: list[int] = []
        for _, piece, token in self._vocabulary.controls.split(text, special=special):
            ids += behind(piece)
            ids += [] if token is None else [token]
        return ids

    def encode_prompt(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of the text that a completion begins with: as `encode`, after the model's begin
        token where the model wants one."""
        vocabulary = self._vocabulary
        begin = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
        return begin + self.encode(text, special=special)

    @property
    def fill_tokens(self) -> FillTokens | None:
        """The marks of a text to fill in; None where the model has none."""
        return self._vocabulary.fill

    def encode_fill(self, prefix: str | Sequence[int], suffix: str) -> list[int]:
        """Return the prompt behind which the model writes what stands between `prefix` and `suffix`, in the order that
        llama-server has: prefix, suffix, middle (tools/server, `/infill`). Control tokens in a text are plain text.
        Raises Unsupported where the model has no marks for that."""
        vocabulary, marks = self._vocabulary, self.fill_tokens
        if marks is None:
            raise Unsupported("this model has no tokens that mark the parts of a text to fill in (FIM)")
        begin = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
        before = self.encode(prefix, special=False) if isinstance(prefix, str) else prefix
        behind = self.encode_behind(suffix, special=False)
        return [*begin, marks.prefix, *before, marks.suffix, *behind, marks.middle]

    def find_breakers(self, text: str) -> tuple[_Breaker, ...]:
        """Return the tokens that a text stands in: those that hold it, and those that end as it begins, with the tokens
        of its rest (llama.cpp, src/llama-sampler.cpp, `get_overlapping_token_sequences`). Those of a few texts are
        kept."""
        kept = self._breakers.get(text)
        if kept is not None:
            return kept
        whole, pieces = text.encode(), self._vocabulary.pieces
        breakers: list[_Breaker] = [(tuple(index for index, piece in enumerate(pieces) if whole in piece), ())]
        for cut in range(1, len(text)):
            begin = text[:cut].encode()
            near = self._ids_by_last_byte.get(begin[-1], ())
            ids = tuple(index for index in near if pieces[index].endswith(begin) and whole not in pieces[index])
            breakers.append((ids, tuple(self.encode_behind(text[cut:], special=False)[:_MOST_TAIL])))
        if len(self._breakers) >= _MOST_BREAKERS:
            self._breakers.clear()
        self._breakers[text] = tuple(breakers)
        return self._breakers[text]

    @cached_property
    def _ids_by_last_byte(self) -> dict[int, list[int]]:
        ids: dict[int, list[int]] = {}
        for index, piece in enumerate(self._vocabulary.pieces):
            if piece:
                ids.setdefault(piece[-1], []).append(index)
        return ids

    @property
    def template_takes_tools(self) -> bool:
        """Whether the chat template itself tells the model of tools; see ChatTemplate."""
        if self._template is None:
            return False
        return self._template.takes_tools or (
            self.configured_form is not None and mentions_tools(self._template.source)
        )

    def find_idle_keywords(self, keywords: Iterable[str]) -> list[str]:
        """Return the keywords that the chat template does not look at."""
        return find_idle_keywords(self._template.source if self._template is not None else "", keywords)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of rendered messages, in which only the template's own control tokens are control tokens. One
        written inside a message, a tool or a keyword is plain text to the model. Raises TemplateError."""
        texts = [*messages, *(tools or ()), {"values": list((keywords or {}).values())}]
        shielded, guard = guard_messages(texts, self._controls)
        text = self.render_chat(
            shielded[: len(messages)],
            add_generation_prompt,
            None if tools is None else shielded[len(messages) : -1],
            dict(zip(keywords or {}, shielded[-1]["values"], strict=True)),
        )
        return self._split_and_encode(_well_formed(text), guard)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        """Return messages as the one text that the chat template makes of them. `keywords`: other variables that it
        may know.

        To get ids use `encode_chat`: in this text a user's control token looks like the template's.
        Raises TemplateError, with the template's own words where it refused.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template; use the completions API, with the prompt as text")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, keywords=keywords
        )

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises Unsupported for an id
        outside the vocabulary."""
        pieces = self._shown if skip_special else self._vocabulary.pieces
        return join_bytes(pieces, ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id stands for: for a control token its name, for an unused id nothing.
        Raises Unsupported for an id outside the vocabulary."""
        return join_bytes(self._vocabulary.pieces, [token_id])

    def decoder(self, shown: Collection[str] = ()) -> TokenTextDecoder:
        """Return what decodes one answer. `shown`: control tokens that it does not skip."""
        ids = [index for text in shown if (index := self.find_control(text)) is not None]
        return TokenTextDecoder(self._shown, {index: self._vocabulary.pieces[index] for index in ids})

    def _split_and_encode(self, text: str, guard: str, *, special: bool = True) -> list[int]:
        whole = self._vocabulary.encode_whole
        if special and whole is not None and not (guard and guard in text):
            return whole(text)
        ids: list[int] = []
        for start, piece, token in self._vocabulary.controls.split(text, special=special):
            ids += self._encode_between(piece, guard, begins=start == 0)
            ids += [] if token is None else [token]
        return ids

    def _encode_between(self, text: str, guard: str, *, begins: bool) -> list[int]:
        if guard:
            text = text.replace(guard, "")
        encode = self._vocabulary.encode if begins else self._vocabulary.encode_inner
        return encode(text) if text else []


def _run_here(template: ChatTemplate) -> ChatTemplate:
    return template


def load_tokenizer(directory: str) -> Tokenizer:
    """Return the tokenizer that a directory has, "" for that of single bytes. Raises ModelRefused."""
    return Tokenizer.load(Path(directory)) if directory else Tokenizer.bytes_only()


def byte_texts() -> list[str]:
    blank = _BYTE_VOCABULARY_SIZE - 256 - len(_BYTE_CONTROLS)
    unused = [f"<|unused_{index}|>" for index in range(blank)]
    return [*map(chr, range(256)), *_BYTE_CONTROLS.values(), *unused]


def _well_formed(text: str) -> str:
    # JSON can spell halves of a surrogate pair ("\ud83d"); joined where they fit, replaced where they do not.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _without_prefix(written: str) -> str | None:
    """Return a tokenizer.json without what puts a space before every text; None where nothing does."""
    if '"type":"Prepend"' not in written and '"prepend_scheme":"always"' not in written:
        return None
    parsed = json.loads(written)
    steps = parsed.get("normalizer") or {}
    if steps.get("type") == "Prepend":
        parsed["normalizer"] = None
    elif steps.get("type") == "Sequence":
        steps["normalizers"] = [step for step in steps["normalizers"] if step["type"] != "Prepend"]
    return json.dumps(parsed).replace('"prepend_scheme": "always"', '"prepend_scheme": "never"')


def _plain_encoder(library: Any) -> Callable[[str], list[int]]:
    library.encode_special_tokens = True  # the library's name for: special tokens in the text are plain text

    def encode(text: str) -> list[int]:
        # Of the library's calls only the batched ones give up the GIL: `encode` would hold it for a whole text.
        ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


def _control_tokens(parsed: Mapping[str, Any], texts: Sequence[str], meta: TokenizerMeta) -> ControlTokens:
    ids = {texts[index]: index for index in meta.control_ids}
    return ControlTokens(ids, meta.user_defined_ids, parsed.get("added_tokens") or ())


def _without_added(parsed: Mapping[str, Any], ids: frozenset[int]) -> str:
    rest = [token for token in parsed["added_tokens"] if token["id"] not in ids]
    return json.dumps({**parsed, "added_tokens": rest}, ensure_ascii=False, separators=(",", ":"))


def _whole_encoder(library: Any, parsed: Mapping[str, Any], meta: TokenizerMeta) -> Callable[[str], list[int]] | None:
    """Return what encodes text with its control tokens; None where these are found in the text as it is."""
    added = {token["id"]: token for token in parsed.get("added_tokens") or ()}
    normalized = any(index in added and added[index]["normalized"] for index in meta.control_ids)
    if not normalized or not added.keys() >= set(meta.control_ids):
        return None
    loaded = library.from_str(json.dumps(parsed))

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


def _texts_by_id(parsed: Mapping[str, Any], library: Any, meta: TokenizerMeta) -> list[str]:
    spaced = meta.user_defined_ids if meta.alphabet == "metaspace" else ()
    ids = parsed["model"].get("vocab")
    if isinstance(ids, dict):  # the library takes a while to make the same
        ids = ids | {token["content"]: token["id"] for token in parsed.get("added_tokens") or ()}
    else:
        ids = library.get_vocab(with_added_tokens=True)
    texts = texts_by_id(ids, meta.vocabulary_size, set(spaced))
    if vocabulary_fingerprint(texts) != meta.vocabulary_fingerprint:
        raise ValueError("its two files do not belong together")
    return texts
