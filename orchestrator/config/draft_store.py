"""The keys `store` and `store_options` of a suffix drafter: where answers are kept that later ones are drafted from."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from pydantic import ByteSize, Field

from orchestrator.config.section import Section, Size
from orchestrator.config.source_text import Place, SourceFile, format_place
from orchestrator.errors import ConfigError

MEMORY, DISK = "memory", "disk"
_DISK_AT = f"{DISK}:"
_SCHEMES = ("redis", "rediss", "unix")
_PARAMETERS = {"db", "protocol", "ssl_ca_certs", "ssl_certfile", "ssl_cert_reqs", "ssl_check_hostname", "ssl_keyfile"}
_FORMS = f"'{MEMORY}', '{DISK}', '{DISK}:PATH', redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///SOCKET?db=DB"
_OF_REDIS = {"password_file", "password_env", "timeout_ms"}


class DraftStoreOptions(Section):
    """How the draft store of `store` is used. A daemon bounds the whole store with each answer that it writes."""

    shared: bool = False
    """`true`: answers to one API key help to draft for every other, which its owner might notice by the time that an
    answer takes. `false`: each key's answers help that key alone."""
    expire_s: float = Field(default=604_800.0, ge=1, le=31_536_000)
    """How long an answer is kept behind its last use as a new one: 7 days."""
    max_entries: int = Field(default=10_000, ge=1, le=10_000_000)
    """Answers that are kept at most; the oldest are forgotten first."""
    max_size: Size = Field(default=ByteSize(64 * 1024 * 1024))
    """What the kept answers may take, as compressed; the oldest are forgotten first."""
    wait_ms: float = Field(default=5.0, ge=0.1, le=60_000)
    """How long a request waits for the store at most. An answer that comes later is not used."""
    timeout_ms: float = Field(default=250.0, ge=1, le=60_000)
    """How long Redis may take to connect, and to answer. Later it counts as away, and is asked again after a while."""
    password_file: str = ""
    """A file with Redis' password (relative to this configuration file), read at each connection. Other users must not
    be able to read it."""
    password_env: str = ""
    """The environment variable with Redis' password."""


def redis_location(store: str) -> str:
    """Return a URL of Redis without user and parameters, as it may be shown."""
    parts = urlsplit(store)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_redis(store: str) -> bool:
    """Return whether a store is a Redis, or what speaks as one."""
    return urlsplit(store).scheme in _SCHEMES


def disk_path(store: str, base: Path, state: Path) -> Path:
    """Return the file of a store on disk: relative to `base`, the configuration's directory; in `state` where none is
    named."""
    named = store.removeprefix(_DISK_AT) if store.startswith(_DISK_AT) else ""
    return base / Path(named).expanduser() if named else state / "drafts.sqlite"


def read_password(file: Path) -> str:
    """Return the password in a file. Raises ConfigError."""
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigError(f"{file}: {why}; write Redis' password there, or leave password_file out") from error
    if mode & 0o077:
        raise ConfigError(f"{file}: is open to other users; chmod 600 it")
    if not text:
        raise ConfigError(f"{file}: is empty; write Redis' password there, or leave password_file out")
    return text


def check_stores(drafts: Sequence[tuple[Place, str, DraftStoreOptions | None]], file: SourceFile) -> None:
    """Refuse stores that are none, that stand where none is used, and keys that would change nothing. `drafts`: the
    place, the store and the options of each suffix drafter, None where they are left out. Raises ConfigError."""
    named: Place | None = None
    for place, store, options in drafts:
        at = (*place, "store")
        if store == MEMORY:
            if options is not None:
                raise file.refuse((*place, "store_options"), "goes with a store; set that, or leave it out")
            continue
        if place[0] == "canary":
            raise file.refuse(at, "the canary has no store of its own: its requests are looked up in that of drafts")
        if "replicas" in place:
            why = "a replica has no store of its own: what it drafts from is looked up in that of the target's drafts"
            raise file.refuse(at, why)
        if named is not None:
            why = f"a model has one store, which is that of {format_place(named)}; leave this one out"
            raise file.refuse(at, why)
        named = at
        if problem := _find_problem(store):
            raise file.refuse(at, problem)
        if options is not None:
            _check_options((*place, "store_options"), store, options, file)


def _find_problem(store: str) -> str:
    """Return what is wrong with a store's name; "" where nothing is. A password is not repeated."""
    if store == DISK or (store.startswith(_DISK_AT) and len(store) > len(_DISK_AT)):
        return ""
    try:
        parts = urlsplit(store)
        has_password = parts.password is not None
        bad_port = not is_redis(store) or (parts.port is not None and parts.port < 1)
    except ValueError:
        return f"is no address; write {_FORMS}"
    if has_password:
        return "has a password, which belongs into store_options.password_file or password_env; take it out here"
    if bad_port or (parts.scheme == "unix") == bool(parts.hostname) or (parts.scheme == "unix" and not parts.path):
        return f"is none; write {_FORMS}"
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name.startswith("ssl_") and parts.scheme != "rediss":
            return f"has the parameter '{name}', which goes with rediss://"
        if name not in _PARAMETERS:
            return f"has the parameter '{name}'; it may have {', '.join(sorted(_PARAMETERS))}"
    if find_spec("redis") is None:
        return "needs the package redis: outrider extras install redis"
    numbers = [value for name, value in parse_qsl(parts.query, keep_blank_values=True) if name in ("db", "protocol")]
    numbers += [parts.path.strip("/") or "0"] * (parts.scheme != "unix")
    return "" if all(map(str.isdecimal, numbers)) else f"names no database by its number; write {_FORMS}"


def _check_options(place: Place, store: str, options: DraftStoreOptions, file: SourceFile) -> None:
    for key in sorted(options.model_fields_set & _OF_REDIS):
        if not is_redis(store):
            raise file.refuse((*place, key), "goes with a store of Redis; leave it out")
    if options.password_file and options.password_env:
        raise file.refuse((*place, "password_env"), "goes without password_file; leave one out")
    if options.password_file:
        try:
            read_password(file.resolve(options.password_file))
        except ConfigError as error:
            raise file.refuse((*place, "password_file"), error) from error
