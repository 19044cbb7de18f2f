"""`nvcli` with the scripted engine in place of `nvcli.llm.LLM`, for tests that kill the process.

python tests/batch/run_nvcli.py '{"delay_s": 0.001}' batch in.jsonl -o out.jsonl
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import nvcli.llm
from nvcli.cli.app import main
from tests.batch.fake_llm import FakeLLM

if __name__ == "__main__":
    nvcli.llm.LLM = partial(FakeLLM, **json.loads(sys.argv[1]))  # type: ignore[misc, assignment]
    sys.exit(main(sys.argv[2:]))
