"""The variables that turn fast paths off: each is read, and what is neither 0 nor 1 is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nvcli.errors import UsageError
from nvcli.kernels import switches
from tests.kernels.triton_testing import needs_triton

# The module that asks, and where it keeps the answer.
PATHS = {
    "NVCLI_CUBLASLT": ("library", "_use_lt"),
    "NVCLI_EARLY_KEYS": ("attention_plan", "_use_early_keys"),
    "NVCLI_FA3_OPERATOR": ("flash_attention", "_use_operator"),
    "NVCLI_FLAT_KEYS": ("flash_attention", "_use_flat_keys"),
    "NVCLI_PDL": ("launch", "_use_pdl"),
    "NVCLI_SHARED_PREFIX": ("shared_prefix", "_use_sharing"),
}
SCRIPT = """
import importlib, json, sys
found = {}
for variable, (module, name) in json.loads(sys.argv[1]).items():
    found[variable] = getattr(importlib.import_module(f"nvcli.kernels.{module}"), name)
print(json.dumps(found))
"""


@needs_triton
@pytest.mark.torch
@pytest.mark.parametrize(("text", "is_on"), [("0", False), ("1", True), ("", True), (None, True)])
def test_each_variable_turns_its_path_off(text: str | None, is_on: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name not in PATHS}
    env |= {} if text is None else dict.fromkeys(PATHS, text)
    run = [sys.executable, "-c", SCRIPT, json.dumps(PATHS)]
    found = json.loads(subprocess.run(run, env=env, capture_output=True, check=True).stdout)
    assert found == dict.fromkeys(PATHS, is_on)


@pytest.mark.parametrize("text", ["off", "false", "00", " 0"])
def test_what_is_neither_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NVCLI_PDL", text)
    with pytest.raises(UsageError) as caught:
        switches.is_on("NVCLI_PDL")
    assert str(caught.value).startswith(f"NVCLI_PDL must be 0 or 1, got {text!r}")
