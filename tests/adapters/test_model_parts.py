"""Model files that packages carry in parts are joined once, by the store, and compared with their sum."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from adapters.contract import ModelRefused, Progress
from adapters.model_source import resolve
from adapters.model_store import ModelStore

WHOLE = bytes(range(256)) * 50
SOURCE = "package:cut_model_7c1/tiny-Q4_0.gguf"


class Reads:
    """A recipe that keeps what it was given."""

    name = "reads"

    def recipe(self) -> str:
        return "1"

    def prepare(self, source: Path, target: Path, progress: Progress) -> None:
        (target / "copy").write_bytes(source.read_bytes())
        (target / source.name).write_bytes(b"")


def install(site: Path, name: str, files: dict[str, bytes], requires: list[str] | None = None) -> None:
    """Lay out an installed package whose code must not run."""
    package, info = site / name, site / f"{name}-1.0.dist-info"
    (package / "data").mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    for file, content in files.items():
        (package / "data" / file).write_bytes(content)
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires or [])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
    (info / "top_level.txt").write_text(f"{name}\n")
    written = [f"{name}/__init__.py", *(f"{name}/data/{file}" for file in files)]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in written))


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    return directory


def install_all(site: Path, parts: list[int], sums: bytes = b"") -> None:
    requires = ["cut_model_7c1_a==1.0", 'never_installed_7c1; extra == "more"']
    install(site, "cut_model_7c1", {"SHA256SUMS": sums} if sums else {}, requires)
    cut = len(WHOLE) // 11
    made = {f"tiny-Q4_0.gguf.part{n:02}": WHOLE[n * cut : (n + 1) * cut if n < 10 else None] for n in parts}
    install(site, "cut_model_7c1_a", made)


def sums_of(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  tiny-Q4_0.gguf\n".encode()


@pytest.mark.parametrize("sums", [b"", sums_of(WHOLE)], ids=["unsaid", "said"])
def test_parts_become_one_file_in_their_order(site, store_root, sums):
    install_all(site, [*range(11)], sums)
    file = resolve(SOURCE, Path())
    assert file.name == "tiny"
    store = ModelStore(store_root)
    stages: list[str] = []
    made = store.prepare(file, Reads(), lambda stage, _: stages.append(stage))
    assert (made / "copy").read_bytes() == WHOLE
    assert (made / "tiny-Q4_0.gguf").exists()
    assert "joining tiny-Q4_0.gguf" in stages
    again: list[str] = []
    assert store.prepare(file, Reads(), lambda stage, _: again.append(stage)) == made
    assert again == []


def test_a_missing_part_is_named(site):
    install_all(site, [0, 1, 3])
    with pytest.raises(ModelRefused, match=r"tiny-Q4_0\.gguf\.part2 is missing.*pip install cut_model_7c1"):
        resolve(SOURCE, Path())


def test_parts_that_do_not_make_the_file_are_refused(site, store_root):
    install_all(site, [*range(11)], sums_of(WHOLE[1:]))
    with pytest.raises(ModelRefused, match="SHA256SUMS"):
        ModelStore(store_root).prepare(resolve(SOURCE, Path()), Reads(), lambda *_: None)
    assert not list(store_root.rglob("*.gguf"))


def test_another_file_of_the_package_is_not_there(site):
    install_all(site, [0, 1])
    with pytest.raises(ModelRefused, match="carries no such file"):
        resolve("package:cut_model_7c1/other.gguf", Path())
