"""The wheel: what is in it, and that it works where this repository is not."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.harness.replica_folders import usual, write_folder
from tests.harness.shipped_files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PACKAGES = (
    "client",
    "commitlog",
    "dledger",
    "jepsen_like",
    "namesrv",
    "remoting",
    "spark_jobs",
)
SCRIPTS = ("dledger", "dledger-broker", "dledger-namesrv", "dledger-chaos")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as somebody would who has no settings of this repository around."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "NAMESRV_ADDR")
    }
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--quiet"),
        *("--build-constraint", ROOT / "constraints.txt", "--wheel-dir", folder),
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; the dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--quiet", "--no-deps", "--no-index", wheel),
        cwd=folder,
    )
    # A path, not a site folder: what is installed here in editable form stays out.
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def test_the_wheel_holds_the_seven_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    (information,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {*PACKAGES, information}
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".typed", ".j2", ".ipynb", ".parquet", ".json")
    }
    assert {name for name in names if not name.startswith(information)} == in_tree


def test_the_wheel_asks_for_nothing_that_only_tests_or_spark_need(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    needs = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    always = [need for need in needs if "extra ==" not in need]
    assert "pysyncobj==0.3.17" in always
    assert not any("pytest" in need or "hypothesis" in need or "spark" in need for need in always)
    assert any(need.startswith("pyspark") for need in needs)


def test_packages_are_loaded_from_where_the_wheel_was_installed(clean: Path) -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    )
    files = run(clean / "venv" / "bin" / "python", "-c", code, *PACKAGES, cwd=clean).splitlines()
    assert len(files) == len(PACKAGES)
    for package, file in zip(PACKAGES, files, strict=True):
        assert Path(file).is_relative_to(clean / "venv"), file
        assert Path(file).parent.name == package


def test_the_scripts_run(clean: Path) -> None:
    scripts = clean / "venv" / "bin"
    for script in SCRIPTS:
        assert "Usage:" in run(scripts / script, "--help", cwd=clean)
        assert run(scripts / script, "--version", cwd=clean).strip()
    assert "namesrv" in run(scripts / "dledger", "--help", cwd=clean)
    settings = run(scripts / "dledger-broker", "-p", cwd=clean)
    assert "store.flush_disk_type" in settings
    assert "listen_port" in run(scripts / "dledger-namesrv", "-p", cwd=clean)
    sample = ROOT / "examples" / "rocketmq-dledger" / "broker-n0.conf"
    assert "RaftNode00" in run(scripts / "dledger-broker", "-c", sample, "-p", cwd=clean)


READ_A_FOLDER = """
import sys
import spark_jobs
from spark_jobs.engines.session import open_session
spark = open_session("local[1]", memory="512m")
spark_jobs.register(spark)
table = spark.read.format("dledger").option("path", sys.argv[1]).option("topic", "T").load()
places = table.select("queue_id", "queue_offset").collect()
print(len(places), len(set(places)), spark_jobs.__file__)
"""


def test_spark_s_workers_find_the_data_source_in_the_installed_wheel(
    clean: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: make setup")
    from spark_jobs.engines.session import why_no_java

    why = why_no_java()
    if why is not None:
        pytest.skip(why)
    log = usual()
    folder = write_folder(tmp_path / "n0", log.frames)
    python = clean / "venv" / "bin" / "python"
    printed = run(python, "-c", READ_A_FOLDER, folder, cwd=clean).split()
    messages = log.offsets["T", 0] + log.offsets["T", 1]
    assert printed[:2] == [str(messages)] * 2
    assert Path(printed[2]).is_relative_to(clean / "venv")
