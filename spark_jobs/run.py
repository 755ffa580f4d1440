"""A run, in a folder of this machine or at an address, and its answer with either engine.

Plan, summary, result and the record of a push group are small; the tables stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.checkers import push_group
from dledger.jepsen_like.checkers.all_checks import Settings, check_source
from dledger.jepsen_like.checkers.kernel.source import Source
from dledger.jepsen_like.checkers.verdict import (
    BadInputError,
    Verdict,
    Violation,
    checked,
    digest_of,
)
from dledger.jepsen_like.history.operation import PUSH_RECORD
from dledger.jepsen_like.history.parquet import (
    FOLDER,
    SUMMARY,
    Ingested,
    NoHistoryError,
    ingest,
    read_summary,
)
from dledger.jepsen_like.plans.plan import Plan, decode_plan
from dledger.jepsen_like.plans.promised import merge_for, promised
from dledger.jepsen_like.report.run_folder import PLAN_FILE, RESULT_FILE, kept_verdicts, read_result
from dledger.spark_jobs.tables import Tables, check_tables, is_address

# ---------------------------------------------------------------------------------- where it is


SMALL: Final = (PLAN_FILE, RESULT_FILE)
"""Files of a run beside its tables."""
OF_TABLES: Final = (PUSH_RECORD, SUMMARY)
"""Small files in the folder of the tables."""
FILE: Final = "file://"


class Place(NamedTuple):
    """A run."""

    folder: Path
    address: str = ""


def path_of(run: Path | str) -> Path | str:
    """Return the path of a run of this machine, `file://` included; the address of another."""
    text = str(run)
    if text.startswith(FILE):
        path = "/" + text.removeprefix(FILE).partition("/")[2]
        # A program that makes addresses writes a space as %20; a person may not.
        return Path(path if Path(path).exists() else unquote(path))
    return text if is_address(text) else Path(text)


@contextmanager
def located(run: Path | str, open_tables: Callable[[str], Tables]) -> Iterator[Place]:
    """Yield where a run is; the copies of small files end with the block.

    Raises BadInputError: there are no whole tables at the address.
    """
    path = path_of(run)
    if isinstance(path, Path):
        yield Place(path)
        return
    address = path.rstrip("/")
    with TemporaryDirectory(prefix="dledger-check-") as made:
        folder = Path(made)
        _copy(open_tables(address), (*SMALL, *OF_TABLES), folder)
        if not (folder / SUMMARY).is_file():
            address = f"{address}/{FOLDER}"
            _copy(open_tables(address), OF_TABLES, folder)
        if not (folder / SUMMARY).is_file():
            raise BadInputError(
                f"{path} holds no {SUMMARY}, here or in {FOLDER}: write the tables there with "
                "dledger history ingest, the summary last"
            )
        yield Place(folder, address)


def _copy(tables: Tables, files: tuple[str, ...], folder: Path) -> None:
    for file in files:
        data = tables.read(file)
        if data is not None:
            (folder / file).write_bytes(data)


# ---------------------------------------------------------------------------------- its answer


Engine = Literal["local", "spark"]
INPUT: Final = "input"
"""The checker that names why a history could not be judged."""


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
        kept: Verdicts of the run itself, which no history holds.
        counts: What became of the records; those that could not be read make it no pass.
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


def no_verdict(why: str, seconds: float = 0.0) -> Outcome:
    """Return the answer where the input gives none: unknown, and *why* in one sentence."""
    verdict = Verdict(INPUT, "unknown", reason=why)
    return Outcome("unknown", why, 0, [], round(seconds, 3), digest_of([verdict]), [verdict])


def judge_run(
    run: Path | str,
    engine: Engine,
    now_s: Callable[[], float],
    *,
    master: str = "",
    report: Callable[[str], object] = lambda _: None,
    on_rows: Callable[[int], object] = lambda _: None,
    on_spark: Callable[[Any], object] = lambda _: None,
    late_max_ns: int | None = None,
) -> Outcome:
    """Judge a run; its tables are made first where they are missing.

    What was guaranteed is taken from the plan of the run, as its runner does. Input that is not
    whole or not known gives *unknown*, with a sentence that names the file and what to do.

    Args:
        run: A path or an address, of a run or of a folder of tables.
        engine: local: numpy in this process, without a JVM; spark: a task for some row groups.
        now_s: Seconds of any clock that only goes forward.
        master: Of Spark; empty: this machine.
        report: Called with what is judged now.
        on_rows: Called with the number of rows judged, by the local engine.
        on_spark: Called with Spark's status tracker when its session is there.
        late_max_ns: How late a delayed message may come, which is in no plan; None: any.

    Raises:
        NoJavaError: Spark is to judge, and there is no Java runtime.
    """
    begin_s = now_s()
    opened = _opener(engine, master, on_rows, on_spark)

    def judged(place: Place) -> Outcome:
        folder = place.folder
        parquet = folder if place.address else tables_of(folder, report)
        counts = read_summary(parquet)
        plan = plan_of(folder, counts)
        with _result_of(folder):
            settings = settings_of(folder, plan, late_max_ns)
            kept = kept_verdicts(folder)
        tables, source_of = opened(place.address or str(parquet.resolve()))
        check_tables(tables, counts)
        verdicts = check_source(source_of(counts), settings, report)
        verdicts += push_groups(parquet)
        again = {verdict.checker for verdict in verdicts}
        kept = [verdict for verdict in kept if verdict.checker not in again]
        return outcome_of(verdicts, kept, counts, plan, now_s() - begin_s)

    try:
        with located(run, lambda address: opened(address)[0]) as place:
            try:
                return judged(place)
            except (BadInputError, NoHistoryError, OSError) as error:
                why = str(error)
                if place.address:
                    why = why.replace(str(place.folder), str(run))
                return no_verdict(why, now_s() - begin_s)
    except (BadInputError, OSError) as error:
        return no_verdict(str(error), now_s() - begin_s)


@contextmanager
def _result_of(folder: Path) -> Iterator[None]:
    """Give an error of reading the result of a run one sentence.

    Raises BadInputError: the result is damaged.
    """
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise BadInputError(
            f"{folder / RESULT_FILE} cannot be read ({error}): copy it again, or take it away to "
            "judge the history alone"
        ) from error


_Opened = tuple[Tables, Callable[[Ingested], Source]]
"""A folder of tables, and what makes an engine over them, given their summary."""


def _opener(
    engine: Engine,
    master: str,
    on_rows: Callable[[int], object],
    on_spark: Callable[[Any], object],
) -> Callable[[str], _Opened]:
    """Return what opens a folder of tables; Spark is started when it opens the first."""
    if engine == "local":
        return lambda place: _of_local(Tables(place), on_rows)
    session: Any = None

    def opened(place: str) -> _Opened:
        from dledger.spark_jobs.engines.session import open_session
        from dledger.spark_jobs.engines.spark import SparkSource, open_tables

        nonlocal session
        if session is None:
            session = open_session(master)
            on_spark(session.sparkContext.statusTracker())
        tables = open_tables(session, place)
        return tables, lambda counts: SparkSource(session, tables, counts.sums, rows=counts.ops)

    return opened


def _of_local(tables: Tables, on_rows: Callable[[int], object]) -> _Opened:
    from dledger.spark_jobs.engines.local import LocalSource

    return tables, lambda counts: LocalSource(tables, on_rows, counts.sums)


def tables_of(folder: Path, report: Callable[[str], object] = lambda _: None) -> Path:
    """Return the folder of tables of a run; make them where they are not whole.

    Raises NoHistoryError: there is no history either.
    """
    if (folder / SUMMARY).is_file() or (folder / "ops.parquet").exists():
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

    Raises BadInputError: it is none, or one of a newer format.
    """
    path = folder / "plan.json"
    try:
        if path.is_file():
            return decode_plan(path.read_text())
        return decode_plan(counts.plan) if counts.plan else None
    except (ConfigError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"the plan of the run, {path}, cannot be used ({error}): check with the version that "
            "wrote it"
        ) from error


def settings_of(folder: Path, plan: Plan | None, late_max_ns: int | None = None) -> Settings:
    """Return what a run guaranteed, by its plan."""
    if plan is None:
        return Settings(late_max_ns=late_max_ns)
    extras = read_result(folder).get("extras", {})
    is_foreign = bool(extras.get("namesrv"))
    return replace(promised(plan, is_foreign=is_foreign), late_max_ns=late_max_ns)


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


def records(run: Path | str) -> int:
    """Return how many operations there are to judge, as far as it is known; 0: not yet."""
    folder = path_of(run)
    for place in (folder, folder / FOLDER) if isinstance(folder, Path) else ():
        if (place / SUMMARY).is_file():
            with suppress(NoHistoryError):
                counts: Ingested = read_summary(place)
                return counts.ops
    return 0
