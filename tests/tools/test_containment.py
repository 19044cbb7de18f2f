"""What a file of tools may do to the program that runs it: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvcli.errors import UsageError
from nvcli.paths import module_environment
from nvcli.tools import Toolbox
from nvcli.tools.functions import FunctionTools
from tests.waiting import PATIENCE_S, is_running, limits, until

TOOLS = '''
import os, subprocess, sys, time

def ask() -> str:
    """Read standard input."""
    return input("name? ")

def child_reads() -> str:
    """A child process reads standard input."""
    return subprocess.run(["cat"], capture_output=True, text=True).stdout + "end"

def child_hangs(file: str) -> str:
    """Wait for a child for ever."""
    child = subprocess.Popen(["sleep", "600"])
    open(file, "w").write(str(child.pid))
    child.wait()

def child_outlives(file: str) -> str:
    """Crash beside a child."""
    child = subprocess.Popen(["sleep", "600"])
    open(file, "w").write(str(child.pid))
    os._exit(3)

def prints(count: int) -> str:
    """Print lines."""
    for i in range(count):
        print(f"line {i}")
    return "printed"

def prints_no_newline() -> str:
    """Print half a line."""
    print("half", end="")
    return "printed"

def surrogate() -> str:
    """Return what no UTF-8 can hold."""
    return "a\\ud800b"

def scribble() -> str:
    """Write into the pipe of the results."""
    for fd in range(3, 30):
        try:
            os.write(fd, b"junk\\n")
        except OSError:
            pass
    return ""
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return path


def wait_dead(pid: int) -> None:
    until(lambda: not is_running(pid), f"{pid} is dead")


def test_standard_input_is_empty(file: Path) -> None:
    said: list[str] = []
    with Toolbox([FunctionTools(file, said.append)], timeout_s=PATIENCE_S) as box:
        assert box.call("ask", "{}").text == "error: EOFError: EOF when reading a line"
        assert box.call("child_reads", "{}").text == "end"
        assert "name? " in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("tool", ["child_hangs", "child_outlives"])
def test_what_a_tool_started_ends_with_it(file: Path, tmp_path: Path, tool: str) -> None:
    pid_file = tmp_path / "pid"
    functions = FunctionTools(file)
    with Toolbox([functions]):
        for limit in limits():
            hurried = Toolbox([functions], timeout_s=limit)
            assert hurried.call(tool, f'{{"file": "{pid_file}"}}').is_error
            if pid_file.exists() and pid_file.read_text():  # it had started its child
                break
        wait_dead(int(pid_file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_running_tool_ends_when_its_parent_is_killed(file: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
from pathlib import Path
from nvcli.tools import Toolbox
from nvcli.tools.functions import FunctionTools
from tests.waiting import PATIENCE_S, limits, until
Toolbox([FunctionTools(Path({str(file)!r}))]).call("child_hangs", '{{"file": "{pid_file}"}}')
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env=module_environment())
    until(lambda: pid_file.exists() and pid_file.read_text(), "the tool has started its child")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_dead(int(pid_file.read_text()))


def test_only_the_first_lines_that_it_prints_are_shown(file: Path) -> None:
    said: list[str] = []
    with Toolbox([FunctionTools(file, said.append)], timeout_s=PATIENCE_S) as box:
        assert box.call("prints", '{"count": 3}').text == "printed"
        assert said == ["line 0", "line 1", "line 2"]
        said.clear()
        assert box.call("prints", '{"count": 50000}').text == "printed"
        assert said[:20] == [f"line {i}" for i in range(20)]
        assert len(said) == 21
        assert said[20].endswith("more lines were left out]")
        said.clear()
        box.call("prints_no_newline", "{}")
        assert said == ["half"]


def test_results_are_valid_text_and_the_pipe_is_checked(file: Path) -> None:
    with Toolbox([FunctionTools(file)], timeout_s=PATIENCE_S) as box:
        assert box.call("surrogate", "{}").text == "a\ufffdb"
        assert box.call("scribble", "{}").is_error
        assert box.call("surrogate", "{}").text == "a\ufffdb"


def test_the_name_is_the_files_and_arguments_must_have_names(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text("def _f(a: int) -> int:\n    return a\n\n__all__ = ['one']\none = _f\n")
    with Toolbox([FunctionTools(path)]) as box:
        assert box.names == ["one"]
        assert box.call("one", '{"a": 3}').text == "3"
    for signature in ("*args", "a, /", "**more"):
        path.write_text(f"def f({signature}):\n    return 1\n")
        with pytest.raises(UsageError, match=r"f cannot be a tool: .* cannot be given by name"):
            FunctionTools(path)


def test_modules_of_the_current_folder_do_not_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = tmp_path / "cloned"
    (hostile / "nvcli").mkdir(parents=True)
    trap = f"open({str(tmp_path / 'trapped')!r}, 'w')\n"
    for name in ("json.py", "typing.py", "pydantic.py", "nvcli/__init__.py"):
        (hostile / name).write_text(trap)
    monkeypatch.chdir(hostile)
    with Toolbox([FunctionTools(file)], timeout_s=PATIENCE_S) as box:
        assert box.call("surrogate", "{}").text == "a\ufffdb"
    assert not (tmp_path / "trapped").exists()
