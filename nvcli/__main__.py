"""`python -m nvcli` and the `nvcli` script.

Little is imported before `main`, so that Ctrl-C finds it from the beginning.
"""

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130  # `InterruptedRunError.exit_code`, which is not imported yet


def main(args: "Sequence[str] | None" = None) -> int:
    """Run the command line. Where it is this process's own (no `args`), Ctrl-C while it is still
    being imported, or when all is done, ends the process there and then: nothing can be lost, and
    an exception might be, as the import machinery has callbacks whose exceptions are printed and
    dropped (see `nvcli.cli.interrupts`)."""
    usual = signal.default_int_handler
    is_ours = args is None and signal.getsignal(signal.SIGINT) is usual  # else it is ignored
    try:
        if is_ours:
            signal.signal(signal.SIGINT, _end)
        from nvcli.cli.app import main as run

        if is_ours:
            signal.signal(signal.SIGINT, usual)
        code = run(args)
        if is_ours:
            signal.signal(signal.SIGINT, _end)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED


def _end(signum: int, frame: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
