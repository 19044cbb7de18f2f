"""Folders where there is no home, and names that are no user's."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from nvcli.models.store import stored_models
from nvcli.paths import expand_user, home_folder, read_whole, why_not_writable, write_whole
from nvcli.repl.store import SessionFile, latest_name
from nvcli.types import Message
from tests.cli.conftest import Cli, cli  # noqa: F401 - a fixture


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user that passwd does not know."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_names_that_are_no_users_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert expand_user("~/x") == Path("/home/ann/x")
    assert expand_user("~nosuch-user/x") == Path("~nosuch-user/x")
    assert home_folder() == Path("/home/ann")


@pytest.mark.usefixtures("homeless")
def test_without_a_home_nothing_is_found_and_nothing_written(cli: Cli) -> None:  # noqa: F811
    assert cli("chat", "x").code == 0
    assert cli("chat", "--show-config").code == 0
    assert [model.name for model in stored_models()] == ["demo"]
    assert latest_name() is None
    with pytest.raises(OSError, match=os.devnull):
        SessionFile("a").save([[Message("user", "x")]])
    told = cli("chat", "--session", "a", "x")
    assert (told.code, "the conversation is not saved" in told.err) == (0, True)


def test_where_a_file_could_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at, and nothing is made or changed."""
    file, link, loop = (tmp_path / name for name in ("file", "link", "loop"))
    file.write_text("mine")
    link.symlink_to(tmp_path / "none" / "x")
    loop.symlink_to(loop)
    before = sorted(tmp_path.iterdir())
    assert why_not_writable(file) is why_not_writable(tmp_path / "new") is None
    assert why_not_writable(Path(os.devnull)) is None
    assert why_not_writable(tmp_path) == "it is a folder"
    assert why_not_writable(tmp_path / "none" / "x") == f"there is no folder {tmp_path}/none"
    assert why_not_writable(link) == f"there is no folder {tmp_path}/none"
    assert why_not_writable(link, replaces=True) is None
    assert why_not_writable(file / "x") == "Not a directory"
    assert why_not_writable(loop) == "Too many levels of symbolic links"
    assert why_not_writable(tmp_path / ("n" * 300)) == "File name too long"
    refused = {file}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in refused)  # root may do all
    assert why_not_writable(file) == "it cannot be written"
    assert why_not_writable(file, replaces=True) is None
    refused = {tmp_path}
    assert why_not_writable(file) is None
    assert why_not_writable(file, replaces=True) == f"{tmp_path} cannot be written"
    assert why_not_writable(tmp_path / "new") == f"{tmp_path} cannot be written"
    assert (sorted(tmp_path.iterdir()), file.read_text()) == (before, "mine")


@pytest.mark.parametrize(("mode", "kept"), [(0o666, 0o640), (0o600, 0o600)])
def test_a_file_written_whole_has_its_mode_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, kept: int
) -> None:
    """Also where a file of another mode was: what is private is never open to others."""
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    seen = []

    def fsync(_: int) -> None:
        seen.extend(stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir() if p != path)

    monkeypatch.setattr(os, "fsync", fsync)
    before = os.umask(0o027)
    try:
        write_whole(path, b"new", is_synced=True, mode=mode)
    finally:
        os.umask(before)
    assert (seen, stat.S_IMODE(path.stat().st_mode)) == ([kept], kept)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"new", [path])


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new", is_synced=True)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_what_has_no_end_is_not_read_to_it(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 5_000_000)
    assert read_whole(path) == read_whole(path, 5_000_000) == b"x" * 5_000_000
    for source in (path, Path("/dev/zero")):
        with pytest.raises(OSError, match="longer than 4 MiB"):
            read_whole(source, 4 << 20)
