"""Benchmarks: ``python -m iris bench CASE``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the benchmark named first in ``argv`` with the rest as its options; returns the exit status."""
    parser = argparse.ArgumentParser(prog="iris bench", description="Measure Iris on this machine.")
    parser.add_argument("case", choices=("rma",), help="rma: bulk put and get in a ring, beside the copy engine")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the case; try: iris bench rma --help")
    chosen = parser.parse_args(argv)
    from iris.bench import rma

    return rma.main(chosen.options)
