"""Records docs/session.svg: a real conversation with the built-in model, in tmux.

    python docs/record_session.py

The keys below are sent to `nvcli chat` as a user would type them; the picture is what the terminal
shows at the end, with its colours.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

DOCS = Path(__file__).resolve().parent
COLUMNS, ROWS = 86, 40
THEME = TerminalTheme(
    (24, 26, 31),
    (222, 224, 230),
    [(60, 64, 72), (232, 102, 113), (140, 200, 120), (226, 192, 120), (110, 170, 240),
     (200, 140, 230), (100, 190, 200), (200, 204, 212)],
)  # fmt: skip

TOOLS = '''\
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"Sunny in {city}"
'''

# what is typed, and what to wait for before the next line
STEPS = [
    ("nvcli chat --tools weather.py", r">>> $"),
    ("What is the capital of France?", r"tok/s.*stop\n>>> $"),
    ("/probs 19", r"rank \d[\s\S]*>>> $"),
    ("What is the weather in Rome?", r"\[a\]lways: $"),
    ("y", r"tok/s.*stop\n>>> $"),
    ("/context", r"last prompt[\s\S]*>>> $"),
]


class Terminal:
    """A tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        self._name = f"record-{uuid.uuid4().hex[:8]}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder), "TMUX": ""}
        env["XDG_CONFIG_HOME"] = env["XDG_RUNTIME_DIR"] = str(folder)
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        command = ["tmux", "-L", self._name, "-f", "/dev/null", "new-session", "-d", *size]
        shell = "env PS1='$ ' bash --norc --noprofile"
        subprocess.run([*command, "-c", str(folder), shell], env=env, check=True)
        self.wait(r"\$ $")

    def _tmux(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._name, *args], check=True, capture_output=True, text=True
        )
        return done.stdout

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)
        self._tmux("send-keys", "Enter")

    def screen(self, *, with_colors: bool = False) -> str:
        flags = ["-e"] if with_colors else []
        return self._tmux("capture-pane", "-p", *flags)

    def wait(self, pattern: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            lines = [line.rstrip() for line in self.screen().rstrip().split("\n")]
            if re.search(pattern, "\n".join(lines) + " "):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {pattern!r} on\n" + "\n".join(lines))
            time.sleep(0.1)

    def close(self) -> None:
        self._tmux("kill-server")


def record() -> str:
    """The screen after all steps, as terminal text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "weather.py").write_text(TOOLS, encoding="utf-8")
        terminal = Terminal(folder)
        try:
            for text, pattern in STEPS:
                terminal.type(text)
                time.sleep(0.5)
                terminal.wait(pattern)
            return terminal.screen(with_colors=True).rstrip()
        finally:
            terminal.close()


def picture(screen: str) -> str:
    console = Console(record=True, width=COLUMNS, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(Text.from_ansi(screen), soft_wrap=False)
    svg = console.export_svg(title="nvcli chat", theme=THEME, unique_id="session")
    return re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)


def main() -> None:
    (DOCS / "session.svg").write_text(picture(record()), encoding="utf-8")


if __name__ == "__main__":
    main()
