"""Leaves the history of a simulated run that is invalid: FIRST_SEED FILE.

A program of its own: it is run from a source tree with a planted bug. It plays plan after plan
until what clients saw is invalid, writes that history and prints the seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dledger.jepsen_like.checkers.all_checks import Settings, check_everything
from dledger.jepsen_like.history.operation import encode_history
from dledger.jepsen_like.plans.draw import draw_plan
from dledger.jepsen_like.plans.promised import clock_error_ns
from dledger.jepsen_like.simulation.play import play

SEEDS = 120
DURATION_S = 120.0


def main(first_seed: int, file: Path) -> int:
    for seed in range(first_seed, first_seed + SEEDS):
        plan = draw_plan(seed, DURATION_S)
        history = play(plan).history
        verdicts = check_everything(
            history,
            Settings(settled=bool(history.replica_reads), clock_error_ns=clock_error_ns(plan)),
        )
        if any(verdict.violations for verdict in verdicts):
            file.write_bytes(encode_history(history))
            print(seed)
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
