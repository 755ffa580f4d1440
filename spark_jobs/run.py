"""A run from its folder to an answer, with either engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from jepsen_like.checkers import push_group
from jepsen_like.checkers.all_checks import Settings, check_source
from jepsen_like.checkers.kernel.source import Source
from jepsen_like.checkers.verdict import Verdict, Violation, checked, digest_of
from jepsen_like.history.parquet import FOLDER, SUMMARY, Ingested, ingest, read_summary
from jepsen_like.history.sequence import PUSH_RECORD
from jepsen_like.plans.plan import Plan, decode_plan
from jepsen_like.plans.promised import merge_for, promised
from jepsen_like.report.run_folder import kept_verdicts, read_result

Engine = Literal["local", "spark"]


class Outcome(msgspec.Struct):
    """The answer of `dledger check`.

    Attributes:
        verdict: valid, invalid or unknown.
        reason: Why it is unknown.
        operations: Rows that were judged.
        anomalies: One object each: checker, name, where, what, witnesses.
        seconds: How long it took.
        digest: Of everything found; equal for every engine and every split.
        verdicts: One per checker.
    """

    verdict: str
    reason: str
    operations: int
    anomalies: list[dict[str, Any]]
    seconds: float
    digest: str
    verdicts: list[Verdict]


def outcome_of(
    verdicts: Sequence[Verdict],
    kept: Sequence[Verdict],
    counts: Ingested,
    plan: Plan | None,
    seconds: float,
) -> Outcome:
    """Return the answer.

    Args:
        verdicts: Of the checks.
        kept: Verdicts of the run itself, which no history holds.
        counts: What became of the records; those that could not be read make it no pass.
        plan: Of the run, where there was one.
        seconds: How long it took.
    """
    every = [*kept, *verdicts]
    if counts.lost_records:
        reason = f"{counts.lost_records} records of the history could not be read"
        every.append(Verdict("ingest", "unknown", reason=reason))
    merged = merge_for(None if plan is None else plan.workload, every)
    return Outcome(
        merged.validity,
        merged.reason,
        counts.ops,
        [_anomaly(violation) for violation in merged.violations],
        round(seconds, 3),
        digest_of(verdicts),
        every,
    )


def _anomaly(violation: Violation) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(violation)
    return row


def judge_run(
    folder: Path,
    engine: Engine,
    now_s: Callable[[], float],
    *,
    master: str = "",
    report: Callable[[str], object] = lambda _: None,
    on_rows: Callable[[int], object] = lambda _: None,
    on_spark: Callable[[Any], object] = lambda _: None,
    late_max_ns: int | None = None,
) -> Outcome:
    """Judge the run in *folder*; its tables are made first where they are missing.

    What was guaranteed is taken from the plan of the run, as its runner does.

    Args:
        folder: A run, or a folder of tables.
        engine: local: numpy in this process, without a JVM; spark: a task for each queue.
        now_s: Seconds of any clock that only goes forward.
        master: Of Spark; empty: this machine.
        report: Called with what is judged now.
        on_rows: Called with the number of rows judged, by the local engine.
        on_spark: Called with Spark's status tracker when its session is there.
        late_max_ns: How late a delayed message may come, which is in no plan; None: any.

    Raises:
        ConfigError: Its plan is none, or one of a newer format.
        NoHistoryError: There is nothing to judge.
        NoJavaError: Spark is to judge, and there is no Java runtime.
        OSError: A file cannot be read or written.
    """
    begin_s = now_s()
    parquet = tables_of(folder, report)
    counts = read_summary(parquet)
    plan = plan_of(folder, counts)
    settings = settings_of(folder, plan, late_max_ns)
    source = _source(parquet, engine, master, on_rows, on_spark)
    verdicts = check_source(source, settings, report)
    verdicts += push_groups(parquet)
    kept = kept_verdicts(folder, {verdict.checker for verdict in verdicts})
    return outcome_of(verdicts, kept, counts, plan, now_s() - begin_s)


def _source(
    parquet: Path,
    engine: Engine,
    master: str,
    on_rows: Callable[[int], object],
    on_spark: Callable[[Any], object],
) -> Source:
    if engine == "local":
        from spark_jobs.engines.local import LocalSource

        return LocalSource(parquet, on_rows)
    from spark_jobs.engines.session import open_session
    from spark_jobs.engines.spark import SparkSource

    session = open_session(master)
    on_spark(session.sparkContext.statusTracker())
    return SparkSource(session, str(parquet.resolve()))


def tables_of(folder: Path, report: Callable[[str], object] = lambda _: None) -> Path:
    """Return the folder of tables of a run; make them where they are not whole.

    Raises:
        NoHistoryError: There is no history either.
    """
    if (folder / SUMMARY).is_file():
        return folder
    parquet = folder / FOLDER
    if not (parquet / SUMMARY).is_file() or is_older(parquet, folder / "history"):
        report("records become tables")
        ingest(folder)
    return parquet


def is_older(parquet: Path, history: Path) -> bool:
    """Whether records were written since the tables were made."""
    made = (parquet / SUMMARY).stat().st_mtime_ns
    written = (*history.glob("*.cbor"), *history.glob(PUSH_RECORD))
    return any(path.stat().st_mtime_ns > made for path in written)


def plan_of(folder: Path, counts: Ingested) -> Plan | None:
    """Return the plan of a run, if it has one: of tables alone the one their history began with.

    Raises:
        ConfigError: It is none, or one of a newer format.
    """
    path = folder / "plan.json"
    text = path.read_text() if path.is_file() else counts.plan
    return decode_plan(text) if text else None


def settings_of(folder: Path, plan: Plan | None, late_max_ns: int | None = None) -> Settings:
    """Return what a run guaranteed, by its plan."""
    if plan is None:
        return Settings(late_max_ns=late_max_ns)
    extras = read_result(folder).get("extras", {})
    is_foreign = bool(extras.get("namesrv"))
    return Settings(**promised(plan, is_foreign=is_foreign), late_max_ns=late_max_ns)


def push_groups(parquet: Path) -> list[Verdict]:
    """Judge the push group of a run, where it had one and left its record."""
    path = parquet / PUSH_RECORD
    if not path.is_file():
        return []
    return [
        checked(
            push_group.NAME,
            lambda: push_group.check_record(push_group.decode_record(path.read_bytes())),
        )
    ]


def records(folder: Path) -> int:
    """Return how many operations there are to judge, as far as it is known; 0: not yet."""
    for place in (folder, folder / FOLDER):
        if (place / SUMMARY).is_file():
            counts: Ingested = read_summary(place)
            return counts.ops
    return 0
