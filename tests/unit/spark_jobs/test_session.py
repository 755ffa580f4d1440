"""What Spark needs of the machine, reported before Spark itself fails."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: make setup")

from dledger.spark_jobs.engines.session import NoJavaError, open_session, why_no_java


def java_that_says(folder: Path, text: str) -> str:
    """Return a JAVA_HOME whose java prints *text*."""
    (folder / "bin").mkdir(parents=True)
    java = folder / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    java.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('openjdk version "17.0.15" 2025-04-15', None),
        ('openjdk version "21" 2023-09-19', None),
        ('openjdk version "11.0.2" 2019-01-15', "Java 11 is here and Spark needs 17"),
        ("nonsense", "no Java runtime is here"),
    ],
)
def test_java_found_or_the_package_to_install_is_named(
    text: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", java_that_says(tmp_path / "java", text))
    why = why_no_java()
    assert (why is None) == (says is None), why
    if says is not None:
        assert why is not None
        assert says in why
        with pytest.raises(
            NoJavaError, match="openjdk-17-jre-headless; or check with --engine local"
        ):
            open_session()
