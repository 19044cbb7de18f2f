"""Files and folders, where the standard library gets them wrong for us or leaves them to us: a home
that is not there, a file that is read or written whole, and where a child process looks for code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import site
import stat
import sys
from functools import partial
from pathlib import Path
from typing import BinaryIO

from nvcli.errors import DeviceError

MAX_WHOLE_BYTES = 256 << 20  # read at once: more than any context holds
MAX_DATA_BYTES = 1 << 30  # of the recorded traffic and the prompts that a bench takes
_PIECE_BYTES = 1 << 20
_NOWHERE = Path(os.devnull)  # no folder: nothing is found below it, nobody can write there


def home_folder() -> Path:
    """Also for a container's user without an entry in passwd, where `Path.home` raises."""
    text = os.path.expanduser("~")
    return Path(text) if text.startswith("/") else _NOWHERE


def xdg_folder(variable: str, usual: str) -> Path:
    """A folder of the XDG standard; `usual` is its place in the home. A relative value does not
    count, as the standard asks."""
    base = os.environ.get(variable, "")
    return Path(base) if base.startswith("/") else home_folder() / usual


def state_folder() -> Path:
    """`$XDG_STATE_HOME/nvcli`."""
    return xdg_folder("XDG_STATE_HOME", ".local/state") / "nvcli"


def check_current_folder() -> None:
    """Raises `DeviceError` where it was removed: MKL, which comes with torch, would end the process
    while that is imported."""
    try:
        os.getcwd()
    except OSError as exc:
        raise DeviceError(
            "the folder that this was started in is gone, and torch needs one",
            hint="Start it in another.",
        ) from exc


def expand_user(path: str | Path) -> Path:
    """`~` and `~name` expanded as a shell does: what names no user stays as it is written."""
    return Path(os.path.expanduser(path))


def why_not_writable(path: Path, *, replaces: bool = False) -> str | None:
    """Why a file could not be written there, None where it could. Nothing is made or changed, so it
    can be asked before minutes of work whose result the file is to hold.

    replaces: the file is written under another name and takes its place: the folder has to be
    writable, the file itself need not.
    """
    folder = path.parent
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "it is a folder"
        if replaces and not stat.S_ISREG(mode):  # a device or a pipe would be gone
            return "it is no regular file"
        if not replaces:
            return None if os.access(path, os.W_OK) else "it cannot be written"
    except FileNotFoundError:  # also of a link that leads to a file that is not there yet
        if os.path.islink(path) and not replaces:
            folder = Path(os.path.realpath(path)).parent
    except OSError as exc:  # a name that is too long, a folder that nobody may look into
        return exc.strerror or str(exc)
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def read_whole(source: Path | BinaryIO, limit: int = MAX_WHOLE_BYTES) -> bytes:
    """All of a file or a stream, which may be a device that never ends. Raises `OSError`, also for
    what is longer than the limit."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            return read_whole(file, limit)
    data = bytearray()
    while piece := source.read(_PIECE_BYTES):
        data += piece
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"it is longer than {limit >> 20} MiB")
    return bytes(data)


def write_whole(path: Path, data: bytes, *, is_synced: bool = False, mode: int = 0o666) -> None:
    """A file that is never seen half written: until it is whole, what was there stays. is_synced:
    it is on the disk before this returns. mode: of the new file, less what the umask takes away.
    Raises `OSError`, and then leaves nothing behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def module_command(module: str) -> list[str]:
    """Starts one of our modules. `-P`: a folder the user has merely entered may hold a `json.py`,
    which must not run.
    """
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """For `module_command`: with the package that runs here, also from a checkout that is not
    installed.
    """
    root = str(Path(__file__).resolve().parents[1])
    environment = dict(os.environ)
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else root
    return environment
