"""Puts the training code, which lies outside the package, on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "demo-model"))
