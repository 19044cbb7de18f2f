"""`python -m nvcli` and the `nvcli` script."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line. Ctrl-C while it is still being imported ends it like any later one."""
    try:
        from nvcli.cli.app import main as run

        return run(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
