"""Folders that the standard library gets wrong for us: a home that is not there, and where a child
process looks for code.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

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


def expand_user(path: str | Path) -> Path:
    """`~` and `~name` expanded as a shell does: what names no user stays as it is written."""
    return Path(os.path.expanduser(path))


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
