"""`python -m nvcli` and the `nvcli` script."""

from __future__ import annotations

import sys

from nvcli.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
