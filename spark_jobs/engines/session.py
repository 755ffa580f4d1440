"""The one Spark session of a process, for this machine or for a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from dledger.commitlog.errors import ConfigError

LOCAL: Final = "local[*]"
JAVA_MIN: Final = 17
SUBMITTED: Final = "submitted"
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(1 << 17),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "true",
    # Facts are narrow already; what is left of them does not get smaller.
    "spark.shuffle.compress": "false",
}
"""Larger batches than Spark's: numpy's own cost is paid per batch."""
JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of the JVM here, which plans and passes bytes on: most of what a short check costs is its start,
and half of that was compiling code that runs once and collecting with several threads. Options of
`spark.driver.extraJavaOptions` stand behind these and win."""


class NoJavaError(ConfigError):
    """Spark needs a Java runtime, and there is none or too old a one."""


def why_no_java() -> str | None:
    """Return what is missing for Spark, and what to do about it; None: nothing."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    version = 0
    if java is not None and Path(java).is_file():
        done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
        found = re.search(r'version "(\d+)', done.stderr + done.stdout)
        version = int(found[1]) if found else 0
    if version >= JAVA_MIN:
        return None
    here = f"Java {version} is" if version else "no Java runtime is"
    return (
        f"{here} here and Spark needs {JAVA_MIN} or later: install a JRE, for example Debian's "
        "openjdk-17-jre-headless"
    )


def open_session(
    master: str = "",
    *,
    memory: str = "4g",
    partitions: int = 0,
    settings: dict[str, str] | None = None,
) -> SparkSession:
    """Return the session of this process; the one that is there, if one is.

    Args:
        master: Spark's URL; empty: this machine's cores; `SUBMITTED`: as `spark-submit` set.
        memory: Of the JVM, where this machine is the master; Python workers have their own.

    Raises:
        NoJavaError: There is no Java runtime that Spark can use.
    """
    why = why_no_java()
    if why is not None:
        raise NoJavaError(f"{why}; or check with --engine local")
    # Workers would start the system's Python otherwise, which lacks pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.Builder().appName("dledger check")
    if master != SUBMITTED:
        builder = builder.master(master or LOCAL)
        builder = builder.config("spark.driver.defaultJavaOptions", JVM)
        # A JVM of its own only builds the command line.
        os.environ.setdefault("SPARK_LAUNCHER_OPTS", JVM)
    if (master or LOCAL).startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.driver.memory", memory)
    if partitions:
        builder = builder.config("spark.sql.shuffle.partitions", str(partitions))
    for name, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def end_session() -> None:
    """Stop the session of this process and wait until its JVM and their workers have ended."""
    session = SparkSession.getActiveSession()
    gateway: Any = SparkContext._gateway
    if session is not None and gateway is not None:
        session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
