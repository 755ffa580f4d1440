"""The wheel: what is in it, and that it works where this repository is not."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dledger.cli.ports import free_ports
from tests.harness.java import need_java
from tests.harness.replica_folders import usual, write_folder
from tests.harness.shipped_files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

LINKED = ("client", "commitlog", "jepsen_like", "namesrv", "remoting", "spark_jobs")
PACKAGES = ("dledger", *(f"dledger.{linked}" for linked in LINKED))
SCRIPTS = (
    *("dledger", "dledger-broker", "dledger-namesrv"),
    *("dledger-chaos", "dledger-proxy", "dledger-console"),
)
SHIPPED = frozenset(
    (
        ".py", ".pyi", ".proto", ".desc", ".typed", ".j2", ".css", ".js", ".svg", ".ipynb",
        ".parquet", ".json", ".yaml", ".toml", ".tpl", ".txt",
    )
)  # fmt: skip


def make_environment(folder: Path, wheel: Path, requirements: list[str], extra: str = "") -> Path:
    """Make an environment with *wheel* and the closure of *requirements*; return its folder.

    What is declared is linked from the environment of the tests, so no network is needed; what is
    imported and not declared is missing there, as it is on the machine of a new user.
    """
    home = folder / "venv"
    venv.create(home, with_pip=False)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"),
            *("--quiet", "--no-deps", "--no-index", str(wheel)),
        ],
        check=True,
    )
    (site,) = (home / "lib").glob("python*/site-packages")
    for found in closure(requirements, {extra} if extra else set()).values():
        for name in _top_names(found):
            target, link = Path(str(found.locate_file(name))), site / name
            if target.exists() and not link.exists():
                link.symlink_to(target)
    return home


def closure(requirements: list[str], extras: set[str]) -> dict[str, Distribution]:
    """Return name → distribution of all that *requirements* need, here and below."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(line), extras) for line in requirements]
    while waiting:
        requirement, chosen = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in chosen or {""}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found[name] = distribution(name)
        waiting += [
            (Requirement(line), set(requirement.extras)) for line in found[name].requires or ()
        ]
    return found


def _top_names(found: Distribution) -> Iterator[str]:
    tops = {file.parts[0] for file in found.files or ()}
    yield from sorted(tops - {"..", "__pycache__"})


def clean_environment() -> dict[str, str]:
    """Return the variables of a user without settings of this repository."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "NAMESRV_ADDR")
    }


def ended(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is."""
    return subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed; return what it prints."""
    done = ended(*command, cwd=cwd)
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


def metadata(wheel: Path, field: str) -> list[str]:
    """Return the values of a field of the wheel's metadata."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode()).get_all(field) or []


def requirements(wheel: Path) -> list[str]:
    """Return what the wheel's metadata asks for."""
    return metadata(wheel, "Requires-Dist")


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the wheel, what it always needs, and no extra."""
    folder = tmp_path_factory.mktemp("bare")
    return make_environment(folder, wheel, requirements(wheel)) / "bin"


@pytest.fixture(scope="module")
def with_chaos(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the extra ``chaos``."""
    folder = tmp_path_factory.mktemp("chaos")
    return make_environment(folder, wheel, requirements(wheel), "chaos") / "bin"


@pytest.fixture(scope="module")
def with_spark(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the extra ``spark``."""
    folder = tmp_path_factory.mktemp("spark")
    return make_environment(folder, wheel, requirements(wheel), "spark") / "bin"


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


def test_wheel_holds_one_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    (information,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"dledger", information}
    in_tree = {
        (Path(below) / path.relative_to(ROOT)).as_posix()
        for package, below in [("dledger", ""), *((linked, "dledger") for linked in LINKED)]
        for path in (ROOT / package).rglob("*")
        if path.suffix in SHIPPED
    }
    assert {name for name in names if not name.startswith(information)} == in_tree


def test_wheel_needs_nothing_of_tests_or_spark(wheel: Path) -> None:
    needs = requirements(wheel)
    always = [need for need in needs if "extra ==" not in need]
    assert "pysyncobj==0.3.17" in always
    assert not any("pytest" in need or "hypothesis" in need or "spark" in need for need in always)
    assert any(need.startswith("pyspark") for need in needs)


def test_wheel_types_are_those_of_every_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"{package.replace('.', '/')}/py.typed" for package in PACKAGES} <= set(names)
    assert "Typing :: Typed" in metadata(wheel, "Classifier")


def test_wheel_metadata_has_extras_and_a_license(wheel: Path) -> None:
    assert metadata(wheel, "Provides-Extra") == ["chaos", "console", "otel", "proxy", "spark"]
    assert metadata(wheel, "License-Expression") == ["Apache-2.0"]
    (keywords,) = metadata(wheel, "Keywords")
    assert {"rocketmq", "raft"} <= set(keywords.split(","))


def test_wheel_plain_install_has_the_face_of_the_client(bare: Path, tmp_path: Path) -> None:
    code = "import dledger; [getattr(dledger, n) for n in dledger.__all__]; print(dledger.__file__)"
    (file,) = run(bare / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(bare.parent)


def test_packages_are_loaded_from_where_the_wheel_was_installed(clean: Path) -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    )
    files = run(clean / "venv" / "bin" / "python", "-c", code, *PACKAGES, cwd=clean).splitlines()
    assert len(files) == len(PACKAGES)
    for package, file in zip(PACKAGES, files, strict=True):
        assert Path(file).is_relative_to(clean / "venv"), file
        assert Path(file).parent.name == package.split(".")[-1]
    (site,) = (clean / "venv" / "lib").glob("python*/site-packages")
    installed = {path.name for path in site.iterdir() if path.name != "dependencies.pth"}
    (information,) = (name for name in installed if name.endswith(".dist-info"))
    assert installed == {"dledger", information}


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


@contextmanager
def running(*command: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a daemon until the end of the block; it must end by itself when it is asked to."""
    with (
        (cwd / "stderr.txt").open("w") as errors,
        subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(60) == 0, (cwd / "stderr.txt").read_text()


def test_wheel_alone_runs_a_cluster(bare: Path, tmp_path: Path) -> None:
    dledger = bare / "dledger"
    up = (dledger, "up", "--brokers", "1", "--dir", tmp_path / "up", "-o", "json")
    with running(*up, cwd=tmp_path) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while lines[-1:] != ["}\n"]:
            lines.append(process.stdout.readline())
            assert lines[-1], (tmp_path / "stderr.txt").read_text()
        names = ("-n", json.loads("".join(lines))["namesrv"])
        run(dledger, "topic", "create", "T", *names, cwd=tmp_path)
        sent = json.loads(
            run(dledger, "send", "-t", "T", "a", "b", *names, "-o", "json", cwd=tmp_path)
        )
        assert [row["status"] for row in sent] == ["SEND_OK", "SEND_OK"]
        read = run(dledger, "consume", "-t", "T", *names, "-o", "json", cwd=tmp_path)
        assert sorted(json.loads(line)["body"] for line in read.splitlines()) == ["a", "b"]


def test_wheel_alone_runs_both_daemons(bare: Path, tmp_path: Path) -> None:
    name_port, *ports = map(str, free_ports(3))
    broker = (
        *("--set", f"broker.namesrv_addr=127.0.0.1:{name_port}"),
        *("--set", "raft.self_id=n0"),
        *("--set", f"raft.peers=n0-127.0.0.1:{ports[0]}", "--listen-port", ports[1]),
        *("--store", tmp_path / "store", "--set", "broker.broker_ip1=127.0.0.1"),
        *("--set", f"store.mapped_file_size_commit_log={64 << 20}"),
    )
    for name in ("n", "b"):
        (tmp_path / name).mkdir()
    with (
        running(bare / "dledger-namesrv", "--listen-port", name_port, cwd=tmp_path / "n"),
        running(bare / "dledger-broker", *broker, cwd=tmp_path / "b"),
    ):
        names = ("-n", f"127.0.0.1:{name_port}")
        run(bare / "dledger", "cluster", "health", "--wait", *names, cwd=tmp_path)
        sent = run(bare / "dledger", "send", "-t", "T", "a", *names, "-o", "json", cwd=tmp_path)
        assert [row["status"] for row in json.loads(sent)] == ["SEND_OK"]


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("dledger-chaos", "run", "--time", "3"), "chaos"),
        (("dledger", "chaos", "list-faults"), "chaos"),
        (("dledger", "check", "latest"), "chaos"),
        (("dledger", "sim", "run", "--seed", "1"), "chaos"),
        (("dledger-proxy", "--help"), "proxy"),
        (("dledger-console",), "console"),
    ],
)
def test_a_missing_extra_is_one_sentence(
    wheel: Path, bare: Path, tmp_path: Path, command: tuple[str, ...], extra: str
) -> None:
    done = ended(bare / command[0], *command[1:], cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this command needs ")
    named = re.findall(r"'?([\w-]+)[<>=]", line.split("; pip install ")[1])
    # The line works wherever the wheel came from: it names the packages of the extra themselves.
    assert sorted(named) == sorted(
        need.split(";")[0].split(">")[0].split("<")[0].split("=")[0]
        for need in requirements(wheel)
        if f"extra == '{extra}'" in need
    )


def test_wheel_alone_suggests_commands(bare: Path, tmp_path: Path) -> None:
    for tokens, said in (
        (("tpoic", "list"), 'error: Unknown command "tpoic". Did you mean "topic"?'),
        (("--nosuch",), 'error: Unknown option "--nosuch".'),
    ):
        done = ended(bare / "dledger", *tokens, cwd=tmp_path)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(said.removesuffix("."))
    for shell in ("bash", "zsh", "fish"):
        assert "retention" in run(bare / "dledger", "completion", shell, cwd=tmp_path)


def test_wheel_with_chaos_makes_and_checks_a_run(with_chaos: Path, tmp_path: Path) -> None:
    run(with_chaos / "dledger-chaos", "list-faults", cwd=tmp_path)
    run(
        *(with_chaos / "dledger-chaos", "run", "--faults", "process", "--time", "3"),
        *("--seed", "3", "--store", tmp_path / "runs"),
        cwd=tmp_path,
    )
    (made,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert (made / "report.html").is_file()
    checked = run(with_chaos / "dledger", "check", made, "-o", "json", cwd=tmp_path)
    assert json.loads(checked)["verdict"] == "valid"
    done = ended(with_chaos / "dledger", "check", made, "--engine", "spark", cwd=tmp_path)
    assert done.returncode == 2
    said, _, line = done.stderr.splitlines()[-1].partition("; ")
    assert said == "error: this command needs pyspark, which is not installed"
    assert line.startswith("pip install ")
    assert "pyspark==" in line


def test_with_spark_a_planted_history_is_checked(with_spark: Path, tmp_path: Path) -> None:
    dledger = with_spark / "dledger"
    run(dledger, "history", "generate", "--out", tmp_path / "made", "--ops", "2000", cwd=tmp_path)
    checked = run(dledger, "check", tmp_path / "made", "-o", "json", cwd=tmp_path)
    assert json.loads(checked)["verdict"] == "valid"


READ_A_FOLDER = """
import sys
from dledger import spark_jobs
from dledger.spark_jobs.engines.session import open_session
spark = open_session("local[1]", memory="512m")
spark_jobs.register(spark)
table = spark.read.format("dledger").option("path", sys.argv[1]).option("topic", "T").load()
places = table.select("queue_id", "queue_offset").collect()
print(len(places), len(set(places)), spark_jobs.__file__)
"""


@pytest.mark.hunt
def test_wheel_gives_spark_workers_the_data_source(clean: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: make setup")
    need_java()
    log = usual()
    folder = write_folder(tmp_path / "n0", log.frames)
    python = clean / "venv" / "bin" / "python"
    printed = run(python, "-c", READ_A_FOLDER, folder, cwd=clean).split()
    messages = log.offsets["T", 0] + log.offsets["T", 1]
    assert printed[:2] == [str(messages)] * 2
    assert Path(printed[2]).is_relative_to(clean / "venv")
