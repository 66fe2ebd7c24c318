"""Makes a store of documents (drafting/passages.py): the text files below a directory, as the model's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.vocabulary import SIMULATED_PREFIX, vocabulary_from
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import ModelOptions
from orchestrator.worker.drafting.passages import write_passages
from orchestrator.worker.loading.prepared import OnProgress, load_own_tokenizer


def index_documents(
    directory: Path, output: Path, config_path: Path | None, model: str, max_tokens: int, progress: OnProgress
) -> dict[str, Any]:
    """Write the store and return what is in it. `model`: whose tokens, by its name ("": the first). Raises ConfigError,
    and what preparing the model's tokenizer raises."""
    options = _find_model(config_path, model)
    files = list_text_files(directory)
    tokenizer = load_store_tokenizer(options, progress)
    documents: list[list[int]] = []
    left_out: list[str] = []
    count = 0
    for number, file in enumerate(files):
        progress(f"reading {file.name}", number / len(files))
        text = read_text_file(file)
        if text is None:
            left_out.append(str(file.relative_to(directory)))
            continue
        documents.append(tokenizer.encode(text, special=False))
        count += len(documents[-1]) + 1
        if count > max_tokens:
            raise ConfigError(
                f"{directory}: has more than {max_tokens} tokens; index a part of it, or raise --max-tokens"
            )
    if not count:
        raise ConfigError(f"{directory}: has no text files; name the directory of the documents")
    return write_store(output, documents, options, str(directory), progress) | {"left_out": left_out}


def write_store(
    output: Path, documents: list[list[int]], options: ModelOptions, source: str, progress: OnProgress
) -> dict[str, Any]:
    """Write a store of a model's tokens and return what is in it. Raises ConfigError."""
    progress("ordering", -1.0)
    fingerprint = vocabulary_fingerprint(vocabulary_from(options.source, Path(options.base), progress))
    try:
        header = write_passages(output, documents, vocabulary=fingerprint, source=source)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror or error}; name another --output") from error
    size = output.stat().st_size
    return {"path": str(output), "documents": header.documents, "tokens": header.tokens, "bytes": size}


def load_store_tokenizer(options: ModelOptions, progress: OnProgress) -> Tokenizer:
    return load_tokenizer("") if options.source.startswith(SIMULATED_PREFIX) else load_own_tokenizer(options, progress)


def find_target(config_path: Path | None, name: str) -> tuple[ClusterConfig, Path]:
    """Return the part of the configuration that is a model's ("": the first), and the file. Raises ConfigError."""
    from orchestrator.config.load import default_config_path, load_config

    path = config_path or default_config_path()
    config = load_config(path, sources=False)  # it may name the store that is to be made
    targets = config.targets
    chosen = next((target for target in targets if target.model.name == name), None) if name else targets[0]
    if chosen is None:
        raise ConfigError(f"{path}: has no model {name!r}; it has {', '.join(target.model.name for target in targets)}")
    return chosen, path


def _find_model(config_path: Path | None, name: str) -> ModelOptions:
    chosen, path = find_target(config_path, name)
    return engine_options(chosen, path.resolve().parent).model


def list_text_files(directory: Path) -> list[Path]:
    """Return the files below a directory in the order of their names, or the file itself. Hidden ones are left out.
    Raises ConfigError."""
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is no directory; name the one with the documents")
    return sorted(_walk(directory))


def _walk(directory: Path) -> Iterator[Path]:
    for entry in directory.iterdir():
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _walk(entry)
        elif entry.is_file():
            yield entry


def read_text_file(file: Path) -> str | None:
    """Return a file's text; None where it is no text, or cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if "\0" not in text and text.strip() else None
