"""Size and time of the test suite, as `make test` runs it: `python -m benchmarks.suite`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from benchmarks.rows import write_row

COMMAND = ["-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "8", "--dist", "loadfile"]


def main() -> int:
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, *COMMAND],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    print(run.stdout)
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped)", run.stdout)}
    write_row(
        "suite",
        metrics={"seconds": round(seconds, 1), **counts},
        config={"workers": os.cpu_count()},
    )
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
