"""From the vocabulary inside a GGUF file to a tokenizer on disk.

Byte-level BPE (`tokenizer.ggml.model` "gpt2") and SentencePiece's BPE ("llama"). For the first, `tokenizer.ggml.pre`
names how text is cut before the merges. The patterns behind the names are llama.cpp's (`llama-vocab.cpp`), because they
define what a GGUF file means. SentencePiece does not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.contract import ModelRefused, Progress
from adapters.gguf_header import GgufHeader, read_header
from adapters.tokenizer_files import END_OF_TURN, FORMAT, TOKENIZER_FILE, TokenizerMeta, write_meta
from adapters.tokenizer_spm import library_of
from device_profiles.workload import vocabulary_fingerprint

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_BYTES, _PIECES = "gpt2", "llama"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_LLAMA3_NAMES = {"llama-bpe", "llama3"}  # a word that is a token is taken as it is, without merges
_COMPOSED = {"qwen2"}  # its authors normalise text to NFC; llama.cpp does not


def write_gguf_tokenizer(source: Path, target: Path, progress: Progress) -> None:
    """See `adapters.tokenizer_recipe.TokenizerRecipe`."""
    progress("reading the vocabulary", 0.0)
    header = read_header(source)
    tokens, kinds = _vocabulary(header)
    meta = _meta(header, tokens, kinds)
    tokenizer = _pieces(header, tokens, kinds) if meta.alphabet == "metaspace" else _build(header, tokens, meta)
    _add(tokenizer, tokens, meta)
    progress("writing the tokenizer", 0.8)
    tokenizer.save(str(target / TOKENIZER_FILE), pretty=False)
    write_meta(meta, header.text("tokenizer.chat_template"), target)
    progress("writing the tokenizer", 1.0)


def _vocabulary(header: GgufHeader) -> tuple[list[str], list[int]]:
    model = header.text("tokenizer.ggml.model")
    if model not in (_BYTES, _PIECES):
        supported = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        raise _build_refusal(header, f"its tokenizer is of the kind {model!r}; supported are {supported}")
    tokens = header.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise _build_refusal(header, "it has no vocabulary (tokenizer.ggml.tokens)")
    kinds = header.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise _build_refusal(header, f"it has {len(tokens)} tokens but {len(kinds)} token types (damaged)")
    if len(set(tokens)) != len(tokens):
        raise _build_refusal(header, "two of its tokens have the same text (damaged)")
    # Some converters call an end-of-turn token a normal one; llama.cpp corrects that by name, and so do we.
    return tokens, [
        _CONTROL if kind == _UNKNOWN or token in END_OF_TURN else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def _meta(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int]) -> TokenizerMeta:
    pieces = header.text("tokenizer.ggml.model") == _PIECES
    pre = _PIECES if pieces else header.text("tokenizer.ggml.pre") or "default"
    if not pieces and pre not in _PATTERNS:
        raise _build_refusal(header, f"it cuts text in the way {pre!r}; supported are {', '.join(sorted(_PATTERNS))}")
    eos = _token_id(header, "eos", len(tokens))
    ends = {eos, _token_id(header, "eot", len(tokens)), _token_id(header, "eom", len(tokens))} - {None}
    ends |= {index for index, token in enumerate(tokens) if token in END_OF_TURN}
    add_bos = header.flag("tokenizer.ggml.add_bos_token")
    return TokenizerMeta(
        format=FORMAT,
        pre=pre,
        bos_id=_token_id(header, "bos", len(tokens)),
        eos_id=eos,
        eos_ids=sorted(index for index in ends if index is not None),
        add_bos=(pieces or pre in _LLAMA3_NAMES) if add_bos is None else add_bos,
        control_ids=_of_kind(kinds, {_CONTROL}),
        user_defined_ids=_of_kind(kinds, {_USER_DEFINED}),
        unused_ids=[i for i, kind in enumerate(kinds) if kind not in {_NORMAL, _CONTROL, _USER_DEFINED, _BYTE}],
        vocabulary_size=len(tokens),
        vocabulary_fingerprint=vocabulary_fingerprint(tokens),
        alphabet="metaspace" if pieces else "bytes",
    )


def _of_kind(kinds: Sequence[int], wanted: set[int]) -> list[int]:
    return [index for index, kind in enumerate(kinds) if kind in wanted]


def _token_id(header: GgufHeader, role: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    found = header.integer(key)
    if found is not None and not 0 <= found < count:
        raise _build_refusal(header, f"{key} is {found}, outside its vocabulary of {count} tokens (damaged)")
    return found


def _build(header: GgufHeader, tokens: Sequence[str], meta: TokenizerMeta) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [_split_merge(header, merge) for merge in header.texts("tokenizer.ggml.merges") or []]
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=meta.pre in _LLAMA3_NAMES,
        )
    except Exception as error:  # the library raises bare Exception for merges of unknown tokens
        raise _build_refusal(header, f"its merges do not fit its vocabulary: {error} (damaged)") from error
    tokenizer = Tokenizer(model)
    if meta.pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cutter(meta.pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int]) -> Any:
    unknown = _token_id(header, "unknown", len(tokens))
    return library_of(header, tokens, _of_kind(kinds, {_NORMAL}), unknown)


def _add(tokenizer: Any, tokens: Sequence[str], meta: TokenizerMeta) -> None:
    from tokenizers import AddedToken

    added = [AddedToken(tokens[i], special=True, normalized=False) for i in meta.control_ids]
    added += [AddedToken(tokens[i], special=False, normalized=False) for i in meta.user_defined_ids]
    tokenizer.add_tokens(added)


def _cutter(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    cuts: list[Any] = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in _PATTERNS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_PATTERNS[pre][-1] == _GPT2)
    if _PATTERNS[pre] == _SINGLE_DIGITS:
        # The same cuts by compiled code instead of a regular expression: several times faster.
        cuts = [pre_tokenizers.Digits(individual_digits=True)]
    elif _PATTERNS[pre][-1] == _GPT2:
        cuts = cuts[:-1]
    return pre_tokenizers.Sequence([*cuts, to_bytes])


def _split_merge(header: GgufHeader, merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # from 1: the left half may itself begin with a space
    if cut < 0:
        raise _build_refusal(header, f"the merge {merge!r} does not have two halves (damaged)")
    return merge[:cut], merge[cut + 1 :]


def _build_refusal(header: GgufHeader, reason: str) -> ModelRefused:
    return ModelRefused(f"{header.path.name}: {reason}. Choose another model file.")
