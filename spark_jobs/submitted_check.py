"""``spark-submit spark_jobs/submitted_check.py RUN``: the verdict as JSON; exit 0, 1 or 2."""

from __future__ import annotations

import sys
import time

import msgspec

from dledger.spark_jobs.run import judge_run


def main(arguments: list[str]) -> int:
    """Judge the run named by the one argument, on the cluster that spark-submit chose."""
    if len(arguments) != 1:
        sys.stderr.write("usage: spark-submit spark_jobs/submitted_check.py RUN\n")
        return 2
    outcome = judge_run(arguments[0], "spark", time.monotonic, master="submitted")
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(outcome)).decode() + "\n")
    sys.stdout.flush()
    return {"valid": 0, "invalid": 1}.get(outcome.verdict, 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
