"""Where a daemon's admin socket is. Reads as little as it can: commands that only ask a daemon wait for no more."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from orchestrator.errors import ConfigError

USUAL_PLACES: Final = (Path("cluster.yaml"), Path("/etc/outrider/cluster.yaml"))
DEFAULT_PORT: Final = 8000  # as vLLM's


def find_config_path() -> Path | None:
    """Return ./cluster.yaml or /etc/outrider/cluster.yaml; None where neither is there."""
    return next((path for path in USUAL_PLACES if path.is_file()), None)


def choose_socket(configured: str, port: int) -> Path:
    """Return the admin socket's path: as configured, else in the user's runtime directory, by port.

    Raises ConfigError when there is no runtime directory and none can be made that is safe from other users.
    """
    if configured:
        return Path(configured)
    directory = os.environ.get("RUNTIME_DIRECTORY") or os.environ.get("XDG_RUNTIME_DIR")
    if directory:
        return Path(directory.split(":")[0]) / f"outrider-{port}.sock"
    return _private_directory() / f"outrider-{port}.sock"


def guess_socket(config: Path | None, port: int | None) -> Path | None:
    """Return the socket that a plainly written cluster.yaml names, unchecked; None where that needs a full reading.
    `config` None: the usual places. Raises ConfigError as `choose_socket` does."""
    file = config or find_config_path()
    if file is None:
        return choose_socket("", DEFAULT_PORT if port is None else port)
    import yaml

    try:
        data = yaml.load(file.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # safe
    except (OSError, ValueError, yaml.YAMLError):
        return None
    api = data.get("api", {}) if isinstance(data, dict) else None
    if not isinstance(api, dict):
        return None
    named, written = api.get("admin_socket", ""), api.get("port", DEFAULT_PORT)
    if not isinstance(named, str) or type(written) is not int:
        return None
    return choose_socket(named, written if port is None else port)


def _private_directory() -> Path:
    """Return a directory under the temporary one that only this user can open.

    Others can write to the temporary directory: what stands there under our name may be somebody's trap.
    """
    import tempfile

    private = Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        about = private.lstat()
    except OSError as error:
        raise ConfigError(f"{private}: {error.strerror}; set api.admin_socket") from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise ConfigError(f"{private}: is no directory of this user; remove it, or set api.admin_socket")
    if about.st_mode & 0o077:
        raise ConfigError(f"{private}: is open to other users; chmod 700 it, or set api.admin_socket")
    return private
