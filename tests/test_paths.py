"""Folders where there is no home, and names that are no user's."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from nvcli.models.store import stored_models
from nvcli.paths import expand_user, home_folder
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
