"""From a model's name to its folder: the built-in model, folders, and a hub on localhost."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from nvcli.errors import ModelNotFoundError
from nvcli.models.resolve import demo_folder, resolve_model
from tests.waiting import PATIENCE_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"never fetched",
    "README.md": b"never fetched",
}


class Hub(BaseHTTPRequestHandler):
    """Just enough of a hub for one repository, someone/tiny; it counts the files it sent."""

    sent: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/someone/tiny/tree/"):
            self.send_json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                    for name, data in FILES.items()
                ]
            )
        elif path.startswith("/api/models/someone/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            self.send_json({"id": "someone/tiny", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/someone/tiny/resolve/") and path.rsplit("/", 1)[1] in FILES:
            name = path.rsplit("/", 1)[1]
            self.send_response(200)
            self.send_header("ETag", f'"{digest(FILES[name])}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(FILES[name])))
            self.end_headers()
            if with_body:
                self.sent.append(name)
                self.wfile.write(FILES[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Hub.sent.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_in_process(name: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The hub's library reads its environment once, so each case runs in a process of its own."""
    code = (
        "import sys\n"
        "from nvcli.errors import NvcliError\n"
        "from nvcli.models.resolve import resolve_model\n"
        "try:\n    print(resolve_model(sys.argv[1]))\n"
        "except NvcliError as error:\n    print(error); sys.exit(error.exit_code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env={"PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_TELEMETRY": "1", **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_demo_is_the_packaged_folder() -> None:
    assert resolve_model("demo") == demo_folder()


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_missing_folder_names_the_next_step() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("./no/such/folder")
    assert str(caught.value) == (
        "there is no folder ./no/such/folder. "
        "Give a local folder or a Hugging Face id such as Qwen/Qwen3-0.6B."
    )
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_no_folder(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="the name of the model is empty"):
        resolve_model(name)


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="is a file, not a folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_hub_id_is_fetched_once_and_only_what_is_needed(hub: str, tmp_path: Path) -> None:
    first = resolve_in_process("someone/tiny", HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    folder = Path(first.stdout.strip())
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
    assert sorted(Hub.sent) == ["config.json", "model.safetensors"]
    again = resolve_in_process(
        "someone/tiny", HF_ENDPOINT=hub, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert again.stdout == first.stdout
    assert len(Hub.sent) == 2


def test_a_config_is_fetched_without_weights_and_leaves_no_half_model(
    hub: str, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "from nvcli.errors import NvcliError\n"
        "from nvcli.models.resolve import find_local, some_files\n"
        "try:\n"
        "    with some_files(sys.argv[1], 'config.json') as folder:\n"
        "        print((folder / 'config.json').read_text())\n"
        "    print(folder.exists(), find_local(sys.argv[1]))\n"
        "except NvcliError as error:\n    print(error); sys.exit(error.exit_code)\n"
    )

    def run(**env: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", code, "someone/tiny"],
            env={"PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_TELEMETRY": "1", **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert result.returncode in (0, 3), result.stderr
        return result.stdout

    found = run(HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert found == FILES["config.json"].decode() + "\nFalse None\n"
    assert Hub.sent == ["config.json"]
    assert run(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)) == (
        "someone/tiny is not in the cache, and HF_HUB_OFFLINE forbids fetching it. Unset "
        "HF_HUB_OFFLINE or give a local folder or the path of its config.json.\n"
    )


def test_unknown_hub_id(hub: str, tmp_path: Path) -> None:
    result = resolve_in_process("someone/else", HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert result.returncode == 3
    assert result.stdout == (
        "there is no folder and no Hugging Face model someone/else. "
        "Check the spelling; a private model needs HF_TOKEN.\n"
    )


def test_an_id_that_the_hub_does_not_allow(tmp_path: Path) -> None:
    result = resolve_in_process("someone/ti--ny", HF_HOME=str(tmp_path))
    assert (result.returncode, result.stdout) == (3, "'someone/ti--ny' is no Hugging Face id\n")
    pull = [sys.executable, "-m", "nvcli", "models", "pull", "someone/ti--ny"]
    env = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path)}
    pulled = subprocess.run(pull, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert pulled.returncode == 3
    assert pulled.stderr == "nvcli: 'someone/ti--ny' is no Hugging Face id\n"


def test_offline_without_the_model(tmp_path: Path) -> None:
    result = resolve_in_process("someone/tiny", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 3
    assert result.stdout == (
        "someone/tiny is not in the cache, and HF_HUB_OFFLINE forbids fetching it. "
        "Unset HF_HUB_OFFLINE or give a local folder.\n"
    )


def test_unreachable_hub(tmp_path: Path) -> None:
    result = resolve_in_process(
        "someone/tiny", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path)
    )
    assert result.returncode == 3
    assert result.stdout.startswith("someone/tiny is not in the cache and could not be fetched (")
    assert result.stdout.count("\n") == 1


def test_models_pull_shows_progress_and_prints_the_folder(hub: str, tmp_path: Path) -> None:
    def pull(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nvcli", "models", "pull", "someone/tiny", *flags],
            env={"PATH": "/usr/bin:/bin", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    loud = pull()
    assert loud.returncode == 0, loud.stderr
    assert (Path(loud.stdout.strip()) / "config.json").read_bytes() == FILES["config.json"]
    assert "%" in loud.stderr
    shutil.rmtree(tmp_path / "hub")
    quiet = pull("-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, loud.stdout, "")
