"""The pytest plug-in costs nothing where it is not used."""

import subprocess
import sys

import pytest

import dledger.testing

HEAVY = (
    "trio",
    "numpy",
    "structlog",
    "cbor2",
    "pysyncobj",
    "dledger.client.blocking",
    "dledger.broker",
)


def test_loading_the_plug_in_imports_neither_brokers_nor_clients() -> None:
    code = (
        "import pytest, sys; before = set(sys.modules); import dledger.testing.plugin;"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), len(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, _, count = done.stdout.strip().rpartition(" ")
    assert heavy == "[]"
    assert int(count) < 10, "modules that every pytest run would load"


def test_every_public_name_of_the_kit_can_be_imported() -> None:
    for name in dledger.testing.__all__:
        assert getattr(dledger.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = dledger.testing.Nothing
