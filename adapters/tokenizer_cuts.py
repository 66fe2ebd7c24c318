"""How text is cut before byte-level merges: what the names of `tokenizer.ggml.pre` in GGUF files stand for.

The names are llama.cpp's (`llama-vocab.cpp`). A cut is a row of regular expressions: each is applied to the pieces
that the one before left, and a match is a piece of its own. Where llama.cpp's own expressions are a makeshift (its
`std::regex` knows no letter case beyond ASCII, and no combining marks), the model authors' expression stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_LINES = r"[^\n]+|[\n]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_ENDINGS}|{_WORD}|{_THREE_DIGITS}|{_REST}"
_QWEN2 = f"{_ENDINGS}|{_WORD}|{_DIGIT}|{_REST}"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED_REST = _REST.replace(r"[\r\n]*", r"[\r\n/]*")


def _build_cased(upper: str = _UPPER, lower: str = _LOWER, endings: str = "") -> str:
    """Return words that begin anew where a capital follows a small letter."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{upper}*{lower}+{endings}|{lead}{upper}+{lower}*{endings}"


_TEKKEN = f"{_build_cased()}|{_DIGIT}|{_SLASHED_REST}"
_GPT4O = f"{_build_cased(endings=_ENDINGS + '?')}|{_THREE_DIGITS}|{_SLASHED_REST}"
_KIMI = (
    r"[\p{Han}]+|"
    + _build_cased(_UPPER[:-1] + r"&&[^\p{Han}]]", _LOWER[:-1] + r"&&[^\p{Han}]]", _ENDINGS + "?")
    + f"|{_THREE_DIGITS}|{_REST}"
)

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SIGN_AND_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_MARKED = f"{_SIGN_AND_WORD}| ?[\\p{{P}}\\p{{S}}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_NO_STOPS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_SPACES_DOWN = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_YOUTU_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-"
    "\ufe4f]+|[\u3105-\u312f]+|" + _CJK
)

_LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_ROWS: list[tuple[str, tuple[str, ...]]] = [
    ("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat", (_GPT2,)),
    ("a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling", (_GPT2,)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (_DIGIT, _GPT2)),
    (_LLAMA3_NAMES, (_LLAMA3,)),
    ("smaug-bpe dbrx chatglm-bpe glm4 glm5", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", (_QWEN2,)),
    ("qwen35", (_QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),)),
    ("laguna", (_LINES, _QWEN2)),
    ("ufakzeka", (_QWEN2.removeprefix(f"{_ENDINGS}|"),)),
    ("seed-coder", (_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)),
    ("bailingmoe bailingmoe2 llada-moe", (_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    ("minicpm5", (_THREE_DIGITS, _LLAMA3.replace(_THREE_DIGITS, r"\p{N}+"))),
    ("jais-2", (_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _SPACES_DOWN + r"|\s{1,2}(?!\S)|\s{1}",)),
    ("k2-horizon", (_LLAMA3.replace(r"\p{L}+", "[\\p{L}\\p{M}\u200c\u200d]+"),)),
    ("tekken", (_TEKKEN,)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", (_GPT4O,)),
    ("kimi-k2", (_KIMI,)),
    ("youtu", (_YOUTU_ASIAN, f"{_build_cased(endings=_ENDINGS + '?')}|{_DIGIT}|{_SLASHED_REST}")),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ("deepseek-llm", (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _HAN_HANGUL, r"\p{N}+")),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, _DIGIT)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (_THREE_DIGITS, _CJK, _MARKED)),
    ("spark2_5", (_THREE_DIGITS, _CJK, _MARKED.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), _DIGIT)),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("poro-chat bloom gpt3-finnish", (_NO_STOPS,)),
    ("viking", (_NO_STOPS, _DIGIT)),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    (
        "exaone-moe",
        (
            f"{_ENDINGS}|[^\\r\\n\\p{{L}}\\p{{N}}]?(?:\\p{{L}}\\p{{M}}*(?: \\p{{L}}\\p{{M}}*)*)+|{_DIGIT}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    (
        "chameleon",
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
    ),
]
_STEPS = {name: steps for names, steps in _ROWS for name in names.split()}

# A word that is a token is taken as it is, without merges.
_WHOLE_WORDS = {*_LLAMA3_NAMES.split(), "tekken", "youtu", "glm4", "glm5", "minicpm5", "granite-embed-multi-97m"}
# A text begins with the begin token, unless the file says otherwise.
_BEGINS = {*_LLAMA3_NAMES.split(), "tekken", "chameleon"}
# Their authors normalise text to NFC; llama.cpp does not.
_COMPOSED = {"qwen2", "deepseek-r1-qwen", "qwen35", "f2llmv2"}


@dataclass(frozen=True, slots=True)
class Cut:
    """How text is cut. `whole_words`: a piece that is a token is taken without merges. `adds_bos`: a text begins with
    the begin token where the file says nothing. `composes`: text is brought into NFC first."""

    name: str
    steps: tuple[str, ...]
    whole_words: bool
    adds_bos: bool
    composes: bool

    def build(self) -> Any:
        """Return the pre-tokenizer of `tokenizers`, which also spells bytes in GPT-2's letters."""
        from tokenizers import Regex, pre_tokenizers

        gpt2_last = self.steps[-1] == _GPT2
        cuts: list[Any] = [
            # The same cut by compiled code instead of a regular expression: several times faster.
            pre_tokenizers.Digits(individual_digits=True)
            if step == _DIGIT
            else pre_tokenizers.Split(Regex(step), behavior="isolated")
            for step in (self.steps[:-1] if gpt2_last else self.steps)
        ]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_last)])


def cut_of(name: str) -> Cut | None:
    """Return the cut that `tokenizer.ggml.pre` names; None for an unknown one."""
    steps = _STEPS.get(name)
    if steps is None:
        return None
    return Cut(name, steps, name in _WHOLE_WORDS, name in _BEGINS, name in _COMPOSED)


def list_cuts() -> list[str]:
    return sorted(_STEPS)
