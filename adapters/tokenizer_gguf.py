"""From the vocabulary inside a GGUF file to a tokenizer on disk.

Byte-level BPE (`tokenizer.ggml.model` "gpt2") and SentencePiece's BPE ("llama"). For the first, `tokenizer.ggml.pre`
names how text is cut before the merges (`adapters.tokenizer_cuts`). SentencePiece does not cut.

A SentencePiece vocabulary of a GGUF file (`tokenizer.ggml.model` "llama") as a tokenizer of `tokenizers`.

SentencePiece joins the neighbours whose join has the highest score, the leftmost where several have it; the file
holds scores and no merges. Each way to cut a token into two tokens is a merge, ranked by the token's score, as
transformers makes them from the same vocabularies (convert_slow_tokenizer.py, generate_merges).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from adapters.chat_template import ChatTemplate
from adapters.contract import ModelRefused, Progress
from adapters.fill_tokens import FILL_ROLES
from adapters.gguf_header import GgufHeader
from adapters.tokenizer_cuts import Cut, cut_of, list_cuts
from adapters.tokenizer_files import END_OF_TURN, FORMAT, METASPACE, TOKENIZER_FILE, TokenizerMeta, write_meta
from device_profiles.workload import vocabulary_fingerprint

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # GGUF's kinds of tokens
_BYTES, _PIECES = "gpt2", "llama"
_EMPTY_BEGINS = "[EMPTY_"
_EMPTY = _EMPTY_BEGINS + "{}]"
_PHI3_PLAIN = {"<unk>", "<s>", "<|endoftext|>"}
# Where the file names none, by llama.cpp's rules (ADR 0104).
_USUAL_IDS = {"bos": 1, "eos": 2}

_EARLIER_FILL_KEYS = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_NO_ID = {0xFFFFFFFF, -1}  # what converters write for a token that a model has not


def library_of(header: GgufHeader, tokens: Sequence[str], normal: Collection[int], unknown: int | None) -> Any:
    """Return the library's tokenizer, without added tokens. `normal`: the ids that text is made of by merging.

    Raises ModelRefused where scores are missing.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = read_scores(header, tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges_of(tokens, scores, normal),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    spaces = normalizers.Replace(" ", METASPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(METASPACE), spaces]) if adds_space(header) else spaces
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def adds_space(header: GgufHeader) -> bool:
    """Return whether a space is put before a text; it is unless the file says no. Raises ModelRefused where what it
    says is neither."""
    return header.flag("tokenizer.ggml.add_space_prefix") is not False


def read_scores(header: GgufHeader, tokens: Sequence[str]) -> list[float]:
    """Return the scores of all tokens in id order. Raises ModelRefused where they are missing."""
    scores = header.floats("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelRefused(f"{header.path.name}: it lacks its tokens' scores (damaged). Choose another model file.")
    return scores


def merges_of(tokens: Sequence[str], scores: Sequence[float], normal: Collection[int]) -> list[tuple[str, str]]:
    """Return all merges, the best first; among the cuts of one token the one with the longest left half."""
    parts = {tokens[index] for index in normal}
    merges: list[tuple[float, int, str, int]] = []
    for index in normal:
        token = tokens[index]
        for cut in range(1, len(token)):
            if token[:cut] in parts and token[cut:] in parts:
                merges.append((-scores[index], index, token, -cut))
    merges.sort()
    return [(token[:-cut], token[-cut:]) for _, _, token, cut in merges]


def write_gguf_tokenizer(header: GgufHeader, target: Path, progress: Progress) -> None:
    progress("reading the vocabulary", 0.0)
    tokens, kinds = _vocabulary(header)
    meta = _meta(header, tokens, kinds)
    tokenizer = _pieces(header, tokens, kinds) if meta.alphabet == "metaspace" else _build(header, tokens)
    _add(tokenizer, header, tokens, meta)
    progress("writing the tokenizer", 0.8)
    tokenizer.save(str(target / TOKENIZER_FILE), pretty=False)
    write_meta(meta, _template(header), target)
    progress("writing the tokenizer", 1.0)


def check_tokenizer(header: GgufHeader) -> None:
    """Check all that a file's header says of its tokenizer, in a fraction of a second and with no library.

    Raises ModelRefused where `write_gguf_tokenizer` would: for a vocabulary of another kind, an unknown
    `tokenizer.ggml.pre`, missing merges or scores, ids outside the vocabulary, keys of another type, damage.
    """
    tokens, kinds = _vocabulary(header)
    _meta(header, tokens, kinds)
    _template(header)
    _strips_spaces(header)
    if header.text("tokenizer.ggml.model") == _PIECES:
        read_scores(header, tokens)
        adds_space(header)
        _token_id(header, "unknown", len(tokens))
    else:
        _merges(header, tokens)


def read_template(header: GgufHeader) -> ChatTemplate | None:
    """Return the chat template of a file; None where it has none. Raises ModelRefused as `check_tokenizer`."""
    source = _template(header)
    if not source:
        return None
    tokens, kinds = _vocabulary(header)
    meta = _meta(header, tokens, kinds)
    bos, eos = ("" if index is None else tokens[index] for index in (meta.bos_id, meta.eos_id))
    return ChatTemplate(source, bos_token=bos, eos_token=eos)


def _template(header: GgufHeader) -> str | None:
    return header.text("tokenizer.chat_template")


def token_texts(header: GgufHeader) -> list[str]:
    """Return the texts of all tokens in id order, none where there is no vocabulary. An empty text becomes
    [EMPTY_7], as llama.cpp calls it."""
    texts = header.texts("tokenizer.ggml.tokens") or []
    return [text or _EMPTY.format(index) for index, text in enumerate(texts)]


def _vocabulary(header: GgufHeader) -> tuple[list[str], list[int]]:
    model = header.text("tokenizer.ggml.model")
    if model not in (_BYTES, _PIECES):
        supported = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        raise _build_refusal(header, f"its tokenizer is of the kind {model!r}; supported are {supported}")
    tokens = token_texts(header)
    if not tokens:
        raise _build_refusal(header, "it has no vocabulary (tokenizer.ggml.tokens)")
    kinds = header.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise _build_refusal(header, f"it has {len(tokens)} tokens but {len(kinds)} token types (damaged)")
    if len(set(tokens)) != len(tokens):
        raise _build_refusal(header, "two of its tokens have the same text (damaged)")
    # Some converters call an end-of-turn token a normal one; llama.cpp corrects that by name, and so do we.
    texts = [
        _CONTROL if kind == _UNKNOWN or token in END_OF_TURN else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    for index, token in enumerate(tokens):
        if token.startswith(_EMPTY_BEGINS) and token == _EMPTY.format(index):
            texts[index] = _UNUSED
    return tokens, texts


def _meta(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int]) -> TokenizerMeta:
    cut = None if header.text("tokenizer.ggml.model") == _PIECES else _cut(header)
    bos, eos = _role(header, "bos", kinds, cut), _role(header, "eos", kinds, cut)
    ends = {eos, _token_id(header, "eot", len(tokens)), _token_id(header, "eom", len(tokens))} - {None}
    ends |= {index for index, token in enumerate(tokens) if token in END_OF_TURN}
    add_bos = header.flag("tokenizer.ggml.add_bos_token")
    return TokenizerMeta(
        format=FORMAT,
        pre=_PIECES if cut is None else cut.name,
        bos_id=bos,
        eos_id=eos,
        eos_ids=sorted(index for index in ends if index is not None),
        add_bos=(cut is None or cut.adds_bos) if add_bos is None else add_bos,
        control_ids=_of_kind(kinds, {_CONTROL}),
        user_defined_ids=_of_kind(kinds, {_USER_DEFINED}),
        unused_ids=[i for i, kind in enumerate(kinds) if kind not in {_NORMAL, _CONTROL, _USER_DEFINED, _BYTE}],
        vocabulary_size=len(tokens),
        vocabulary_fingerprint=vocabulary_fingerprint(tokens),
        alphabet="metaspace" if cut is None else "bytes",
        fill_ids=_read_fill_ids(header, len(tokens)),
    )


def _read_fill_ids(header: GgufHeader, count: int) -> dict[str, int]:
    """Return the marks of a text to fill in that the file names, in either of two spellings, by role."""
    ids = {role: _token_id(header, f"fim_{role}", count) for role in FILL_ROLES}
    for role, earlier in _EARLIER_FILL_KEYS.items():
        ids[role] = _token_id(header, earlier, count) if ids[role] is None else ids[role]
    return {role: index for role, index in ids.items() if index is not None}


def _cut(header: GgufHeader) -> Cut:
    name = header.text("tokenizer.ggml.pre") or "default"
    cut = cut_of(name)
    if cut is None:
        known = f"none of the {len(list_cuts())} that are supported (docs/configuration.md names them)"
        raise _build_refusal(header, f"it cuts text in the way {name!r} (tokenizer.ggml.pre), which is {known}")
    return cut


def _of_kind(kinds: Sequence[int], wanted: set[int]) -> list[int]:
    return [index for index, kind in enumerate(kinds) if kind in wanted]


def _role(header: GgufHeader, role: str, kinds: Sequence[int], cut: Cut | None) -> int | None:
    """Return the id of the begin or end token. A SentencePiece vocabulary that names none has it where Llama has it,
    as llama.cpp assumes; it is then a control token."""
    token_id, usual = _token_id(header, role, len(kinds)), _USUAL_IDS[role]
    if token_id is not None or cut is not None or usual >= len(kinds) or kinds[usual] != _CONTROL:
        return token_id
    return usual


def _token_id(header: GgufHeader, role: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = header.integer(key)
    if token_id is None or token_id in _NO_ID:
        return None
    if not 0 <= token_id < count:
        raise _build_refusal(header, f"{key} is {token_id}, outside its vocabulary of {count} tokens (damaged)")
    return token_id


def _build(header: GgufHeader, tokens: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    cut = _cut(header)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(header, tokens),
            ignore_merges=cut.whole_words,
        )
    )
    if cut.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(header: GgufHeader, tokens: Sequence[str]) -> list[tuple[str, str]]:
    written = header.texts("tokenizer.ggml.merges")
    if not written:
        # Without them every text would be single bytes, which the model has hardly seen.
        raise _build_refusal(header, "it has no merges (tokenizer.ggml.merges), without which no text can be encoded")
    known = set(tokens)
    merges = []
    for merge in written:
        cut = merge.find(" ", 1)  # from 1: the left half may itself begin with a space
        if cut < 0:
            raise _build_refusal(header, f"the merge {merge!r} does not have two halves (damaged)")
        left, right = merge[:cut], merge[cut + 1 :]
        if left not in known or right not in known or left + right not in known:
            raise _build_refusal(header, f"its merges do not fit its vocabulary: {merge!r} (damaged)")
        merges.append((left, right))
    return merges


def _pieces(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int]) -> Any:
    return library_of(header, tokens, _of_kind(kinds, {_NORMAL}), _token_id(header, "unknown", len(tokens)))


def _add(tokenizer: Any, header: GgufHeader, tokens: Sequence[str], meta: TokenizerMeta) -> None:
    from tokenizers import AddedToken

    strips = _strips_spaces(header)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=special, normalized=False, rstrip=strips and text not in _PHI3_PLAIN)
            for special, ids in ((True, meta.control_ids), (False, meta.user_defined_ids))
            for text in (tokens[index] for index in ids)
        ]
    )


def _strips_spaces(header: GgufHeader) -> bool:
    """Return whether control tokens take the spaces behind them. A GGUF file cannot say so: llama.cpp knows Phi-3's by
    the model's name, and so do we."""
    name = (header.text("general.name") or "").lower()
    return "phi-3" in name or "phi3" in name


def _build_refusal(header: GgufHeader, reason: str) -> ModelRefused:
    return ModelRefused(f"{header.path.name}: {reason}. Choose another model file.")
