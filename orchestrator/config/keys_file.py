"""Reads the file of API keys. Every problem is one line that names the file and the way out.

A line is a record in JSON, which `outrider keys create` writes and which has the key's digest alone, or a key as it is.
Empty lines and lines that begin with # do not count.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from orchestrator.errors import ConfigError

Scope = Literal["inference", "batches", "metrics", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
USUAL_SCOPES: Final[tuple[Scope, ...]] = ("inference", "batches", "metrics")
"""Of a key that says nothing: what steers the daemon has to be asked for."""
_VERSION: Final = "v1:"
"""Before a digest: SHA-256 of the key. Keys are random, so nothing slower is needed to keep them from being guessed."""
_HASH: Final = re.compile(r"v1:[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# ADR 0065: digits of a digest by which a key is found. They are no secret.
_ID_LETTERS: Final = 12
_MOST_BYTES: Final = 16 * 1024 * 1024  # a larger file is another one


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key. `name` is "" for a key that stands in the file as it is. 0: the limit is that of `limits`. `revoked`:
    when; such a record stays, so that its use can be told from a guess."""

    name: str
    hash: str
    scopes: tuple[Scope, ...] = USUAL_SCOPES
    max_requests: int = 0
    max_tokens_per_minute: int = 0
    created: str = ""
    revoked: str = ""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.hash.removeprefix(_VERSION))

    @property
    def key_id(self) -> str:
        """What the key is called where its name is not enough; it says nothing about the key."""
        return id_of(self.digest)


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A record and the number of its line. `plain`: the key itself stands there."""

    record: KeyRecord
    number: int
    plain: bool = False


_decode_record = msgspec.json.Decoder(KeyRecord).decode


def keys_path(configured: str, base: Path) -> Path:
    """Return where the keys are; `base` is the configuration file's directory."""
    return base / Path(configured).expanduser()


def digest_of(key: str) -> bytes:
    """Return a key's digest. All have one length, so comparing them tells nothing about a key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def id_of(digest: bytes) -> str:
    """Return what a key with this digest is called."""
    return digest.hex()[:_ID_LETTERS]


def hash_key(key: str) -> str:
    """Return a key's digest as the file has it, with the version of the hash."""
    return _VERSION + digest_of(key).hex()


def read_keys(path: Path) -> list[KeyLine]:
    """Return the records of the file, revoked ones too.

    Raises ConfigError when the file cannot be read, is open to every user of the machine, or holds no usable record.
    """
    try:
        about = path.stat()
        if about.st_size > _MOST_BYTES:
            raise ConfigError(f"{path}: is larger than {_MOST_BYTES} bytes, so it is no file of keys")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; make it with `outrider keys create NAME`, or remove api.keys_file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text; make it with `outrider keys create NAME`") from error
    if about.st_mode & stat.S_IRWXO:
        raise ConfigError(f"{path}: is open to every user of this machine; chmod o= it")
    lines = parse_keys(text, path)
    if not lines:
        raise ConfigError(f"{path}: holds no key; make one with `outrider keys create NAME`, or remove api.keys_file")
    return lines


def parse_keys(text: str, path: Path) -> list[KeyLine]:
    """Return the records of a text. Raises ConfigError with the line of `path`."""
    lines: list[KeyLine] = []
    names: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        written = line.strip()
        if not written or written.startswith("#"):
            continue
        if not written.startswith("{"):
            if not (written.isascii() and written.isprintable()) or " " in written:
                raise ConfigError(f"{path}:{number}: a key is printable ASCII without spaces")
            lines.append(KeyLine(KeyRecord(name="", hash=hash_key(written)), number, plain=True))
            continue
        record = _read_record(written, f"{path}:{number}:")
        if not record.revoked:
            if record.name in names:
                raise ConfigError(f"{path}:{number}: line {names[record.name]} has the name {record.name!r} too")
            names[record.name] = number
        lines.append(KeyLine(record, number))
    return lines


def check_name(name: str) -> str:
    """Return why this is no name of a key; "" where it is."""
    return "" if _NAME.fullmatch(name) else "a name is up to 64 letters, digits, '.', '_' and '-', a letter first"


def _read_record(written: str, where: str) -> KeyRecord:
    try:
        record: KeyRecord = _decode_record(written)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no record of a key: {error}; make keys with `outrider keys create`") from None
    problem = check_name(record.name)
    if not _HASH.fullmatch(record.hash):
        problem = "its hash is not 'v1:' and 64 hexadecimal digits"
    if record.max_requests < 0 or record.max_tokens_per_minute < 0:
        problem = "its limits are 0 or more"
    if problem:
        raise ConfigError(f"{where} is no record of a key: {problem}; make keys with `outrider keys create`")
    return record
