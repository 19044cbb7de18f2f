"""The engine's process of `nvcli serve` on the simulated device: see `benchmarks.simulated`.

`NVCLI_SIMULATED_MS` says how long a step takes. Started by `benchmarks.serve_load --simulated`.
"""

from __future__ import annotations

import os

from benchmarks.simulated import install
from nvcli.server.engine_worker import main

if __name__ == "__main__":
    install(float(os.environ["NVCLI_SIMULATED_MS"]) * 1e-3, 0)
    main()
