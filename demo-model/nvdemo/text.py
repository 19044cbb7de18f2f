"""Writes samples as JSON lines, to look at or to count.

    python -m nvdemo.text --count 1000 > text.jsonl

Training makes the same text itself, on the fly: the sample at an index depends on the seed and
the index alone.
"""

from __future__ import annotations

import argparse
import json
import sys

from nvdemo.mix import conversation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for index in range(args.count):
        sample = conversation(args.seed, index)
        line = {"kind": sample.kind, "prompt": sample.prompt(), "completion": sample.completion()}
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
