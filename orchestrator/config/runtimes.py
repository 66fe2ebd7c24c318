"""The section `adapters`: settings of single runtimes."""

from __future__ import annotations

from pathlib import Path

from adapters.libllama import VARIABLE, name_build, use_build
from orchestrator.config.section import Section
from orchestrator.config.source_text import SourceFile


class LlamaCppSection(Section):
    """The runtime `llama_cpp`."""

    library: str = ""
    """A `libllama` of mainline llama.cpp that you have built, such as `libllama.so`, with the devices that it was built
    for (relative to this configuration file; each host of a cluster has it there). The environment variable
    `OUTRIDER_LIBLLAMA` goes before it. Empty: of the packages that are installed the first of `ik_llama_cpp`,
    `xllamacpp` and `llama_cpp`."""


class AdaptersSection(Section):
    """Settings of single runtimes."""

    llama_cpp: LlamaCppSection = LlamaCppSection()
    """The runtime `llama_cpp`."""


def library_path(adapters: AdaptersSection, base: Path) -> Path | None:
    """Return llama.cpp's library, None where none is named; `base` is the configuration file's directory."""
    named = adapters.llama_cpp.library
    return base / Path(named).expanduser() if named else None


def check_runtimes(adapters: AdaptersSection, file: SourceFile) -> None:
    """Refuse a library that is not there. Raises ConfigError."""
    library = library_path(adapters, file.base)
    if library is None or name_build() not in ("", str(library)) or library.is_file():
        return
    way_out = "Name the libllama of your build, or leave the key out: then a package that is installed is used"
    why = f"there is no file {library}. {way_out} ({VARIABLE} names one, too)."
    raise file.refuse(("adapters", "llama_cpp", "library"), why)


def use_runtimes(adapters: AdaptersSection, base: Path) -> None:
    """Let this process, and those that it starts, use what the section names."""
    use_build(library_path(adapters, base))
