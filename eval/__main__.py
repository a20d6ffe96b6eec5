#!/usr/bin/env python
"""Compare policies with searches on brute-forced spaces; `ptxflow evaluate --help` explains."""

import os
import sys
from collections.abc import Sequence
from functools import partial

from ptxflow.eval.study.arguments import arguments


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # here and in processes: sums do not depend on the machine
    from ptxflow.eval.study.evaluation import command
    from ptxflow.eval.tune.method import spoken, tuners

    model = partial(spoken, args.transcript) if args.transcript else None
    return command(args, tuners, model)


if __name__ == "__main__":
    sys.exit(main())
