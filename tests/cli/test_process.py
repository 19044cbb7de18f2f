"""The command as a process: pipes that close, signals, disks that are full, odd locales."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repl.driver import Log
from tests.waiting import PATIENCE_S, run_command

ROOT = Path(__file__).parents[2]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "tests.repl.fake_chat", *args]


def start(*args: str, **more: object) -> subprocess.Popen[bytes]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command(*args), cwd=ROOT, **{**options, **more})  # type: ignore[call-overload, no-any-return]


def stderr_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stderr is not None
    with process.stderr as stream:
        return stream.read()


def test_p3_empty_stdin_ends_at_once_without_loading() -> None:
    code = (
        "import sys\nfrom nvcli.__main__ import main\ncode = main(['chat'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    result = run_command([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def test_closed_stdin_counts_as_empty() -> None:
    shell = f"{sys.executable} -m tests.repl.fake_chat plain chat x <&-"
    result = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words", ["chat x", "--version", "--help", "chat --help", "tokens x", "chat --show-config"]
)
def test_an_answer_that_nobody_can_get_is_no_success(words: str) -> None:
    shell = f"{sys.executable} -m tests.repl.fake_chat plain {words} >&-"
    result = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, check=False)
    message = b"nvcli: cannot write to standard output: it is closed\n"
    assert (result.returncode, result.stderr) == (1, message)


def test_an_error_with_standard_error_closed_is_no_answer() -> None:
    shell = f"{sys.executable} -m tests.repl.fake_chat plain chat x --bogus 2>&-"
    result = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (2, b"")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What a library writes to standard error must not land in a file of ours."""
    code = (
        "import os\nfrom nvcli.cli.app import main\nmain(['--version'])\n"
        f"fd = os.open({str(tmp_path / 'out')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "os._exit(fd if all(map(os.get_inheritable, range(3))) else 0)"
    )
    shell = f'{sys.executable} -c "$CODE" <&- >&- 2>&-'
    environ = {**os.environ, "CODE": code}
    result = subprocess.run(["bash", "-c", shell], cwd=ROOT, env=environ, check=False)
    assert result.returncode > 2


@pytest.mark.parametrize("unbuffered", [False, True])
def test_closed_pipe_is_141_and_silent(unbuffered: bool) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"} if unbuffered else None
    process = start("slow", "chat", "x", env=env)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"1 2 "
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 141
    assert stderr_of(process) == b""


def test_help_into_a_closed_pipe_is_141_and_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("plain", "chat", "--help", stdout=write)
    os.close(write)
    assert process.wait(PATIENCE_S) == 141
    assert stderr_of(process) == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("args", [("chat", "x"), ("chat", "--help"), ("--version",)])
def test_full_disk_is_one_line_and_1(args: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start("plain", *args, stdout=full)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err == b"nvcli: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, b"nvcli: interrupted\n"),
        (signal.SIGTERM, 143, b""),
        (signal.SIGHUP, 129, b""),
    ],
)
def test_signals_keep_the_partial_text(number: int, code: int, message: bytes) -> None:
    process = start("slow", "chat", "x")
    assert process.stdout is not None
    first = process.stdout.read(4)
    process.send_signal(number)
    rest, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (code, message)
    assert (first + rest).startswith(b"1 2 ")
    assert rest.endswith(b"\n")


def test_interrupt_in_prefill_is_130(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    env = {**os.environ, "FAKE_CHAT_LOG": str(log.path)}
    process = start("slow-prefill", "chat", "x", "--show-thinking", "full", env=env)
    log.wait(1)  # it was asked, and takes longer than this test has patience
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, b"", b"nvcli: interrupted\n")


def test_c_locale_and_ascii_output() -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = start("unicode", "chat", b"caf\xe9", env=env)  # type: ignore[arg-type]
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out.startswith(b"Space ")
    assert b"Traceback" not in err


def test_r14_text_of_several_tokens_is_whole() -> None:
    process = start("unicode", "chat", "x")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out.decode() == "Space 👩🏽‍🚀 world 世界\n"


def test_waiting_for_a_pipe_that_stays_open_is_told_on_a_terminal() -> None:
    import pty

    master, slave = pty.openpty()
    process = start("plain", "chat", "x", stdin=subprocess.PIPE, stderr=slave)
    os.close(slave)
    told = b""
    while b"--no-stdin leaves it out" not in told:
        told += os.read(master, 4096)
    process.communicate(b"text\n", timeout=PATIENCE_S)
    assert process.returncode == 0
    os.close(master)


def test_arguments_under_a_c_locale_are_utf8() -> None:
    """Python hands them over as surrogates there; only bytes that are no UTF-8 are worth a word."""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for argument, warns in ("é世".encode(), False), (b"\xff", True):
        result = subprocess.run(
            [*command("plain", "chat", "--json"), argument],
            cwd=ROOT, env=env, capture_output=True, check=False,
        )  # fmt: skip
        assert (b"not UTF-8" in result.stderr) == warns
    result = subprocess.run(
        [sys.executable, "-m", "nvcli", "tokens", "--json", "é世"],
        cwd=ROOT, env=env, capture_output=True, check=False,
    )  # fmt: skip
    assert b'"text": "\\u00e9\\u4e16"' in result.stdout
