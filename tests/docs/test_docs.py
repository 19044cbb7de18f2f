"""Documentation that cannot drift: README's code runs, its links lead somewhere, its numbers are
those of the rows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.kernel_rates import Rate
from benchmarks.tables import PAGES as TABLE_PAGES
from benchmarks.tables import fair, fill

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.torch
@pytest.mark.parametrize("code", blocks(ROOT / "README.md", "python"))
def test_readme_python_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = "http://127.0.0.1:8000"
    if address in code:  # it talks to `nvcli serve`
        from nvcli import LLM
        from nvcli.server.config import ServerConfig
        from tests.server.conftest import Served

        served = Served(LLM("demo"), ServerConfig())
        try:
            names: dict[str, object] = {"__name__": "readme"}
            exec(compile(code.replace(address, served.url), "README.md", "exec"), names)
            names["client"].close()  # type: ignore[attr-defined]
        finally:
            served.close()
        assert "Paris" in capsys.readouterr().out
        return
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_runs_whose_host_kept_the_peer_back_are_left_out() -> None:
    def run(speed: float | None) -> tuple[dict[str, dict[str, object]], ...]:
        return {"metrics": {}}, {"metrics": {} if speed is None else {"A": {"tok_s": speed}}}

    runs = [run(speed) for speed in (1000.0, None, 900.0, 899.0, 500.0)]
    assert fair(runs) == runs[:3]
    assert fair([run(None)]) == [run(None)]


@pytest.mark.parametrize("page", TABLE_PAGES)
def test_tables_are_those_of_the_rows(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert fill(page, text) == text


def test_a_rate_is_bytes_or_operations_over_time_beside_its_floor() -> None:
    of_bytes = Rate("a", "b", 2.0, 4.49e6, "c", peer_us=5.0)
    assert of_bytes.line() == "| a | b | 2 | 2,245 GB/s | 50% | 5 | c |"
    of_operations = Rate("a", "b", 2000.0, 777e9, "c", is_bytes=False)
    assert of_operations.line() == "| a | b | 2,000 | 388 TFLOP/s | 50% |  | c |"


def test_readme_commands_exist(cli_names: set[str]) -> None:
    text = "\n".join(blocks(ROOT / "README.md", "sh"))
    used = set(re.findall(r"nvcli (\w+)", text))
    assert used
    assert used <= cli_names


@pytest.fixture
def cli_names() -> set[str]:
    from nvcli.cli.app import command_line

    return set(command_line().commands)


def test_make_verbs_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for verb in re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
