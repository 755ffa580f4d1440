"""What the packages import is what the distribution asks for."""

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("client", "commitlog", "dledger", "jepsen_like", "namesrv", "remoting", "spark_jobs")

COMES_WITH = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "markupsafe": "jinja2",
    "opentelemetry": "opentelemetry-api",
    "yaml": "pyyaml",
}
"""Modules of a distribution that has another name, or that a declared one cannot be without."""

PROXY = "dledger/proxy/"
TELEMETRY = "client/telemetry.py"
GRPC_CALLS = "jepsen_like/chaos/grpc_calls.py"
"""Parts of a package that need an extra."""

HOSTS = {
    "dledger/testing/plugin.py": {"pytest"},
    "spark_jobs/notebooks/build.py": {"jupytext", "nbclient", "nbformat", "pillow"},
    "spark_jobs/notebooks/check_a_history.py": {"ipython"},
}
"""Files that only the program they are written for loads: a pytest plug-in, a notebook."""


def declared(extra: str | None) -> set[str]:
    lines = (
        PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"].get(extra)
    )
    return {canonicalize_name(Requirement(line).name) for line in lines}


@cache
def imported(file: Path) -> frozenset[str]:
    return frozenset(_imported(file))


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def third_party(package: str, *, without: str = "") -> dict[str, set[str]]:
    """Return distribution → files that import it, without what their host brings."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in (ROOT / package).rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        if without and name.startswith(without):
            continue
        for module in imported(file):
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES:
                continue
            distribution = canonicalize_name(COMES_WITH.get(top, top))
            if distribution not in HOSTS.get(name, ()):
                found[distribution].add(name)
    return found


def test_dependencies_of_brokers_and_clients_need_no_extra() -> None:
    always = declared(None)
    for package in ("client", "commitlog", "dledger", "namesrv", "remoting"):
        found = third_party(package, without="dledger/console/")
        assert found, package
        for distribution, files in found.items():
            others = {file for file in files if not file.startswith((PROXY, TELEMETRY))}
            assert distribution in always or not others, (distribution, sorted(others))


def test_dependencies_of_a_proxy_are_in_its_extra() -> None:
    allowed = declared(None) | declared("proxy")
    for distribution, files in third_party("dledger", without="dledger/console/").items():
        assert distribution in allowed, (distribution, sorted(files))


def test_dependencies_of_telemetry_are_in_extra_otel() -> None:
    found = {name for name, files in third_party("client").items() if TELEMETRY in files}
    assert found - declared(None) == declared("otel") == {"opentelemetry-api"}


def test_dependencies_of_the_console_are_in_its_extra() -> None:
    always = declared(None) | declared("console")
    found = third_party("dledger/console")
    assert {"hypercorn", "jinja2", "starlette"} <= set(found)
    for distribution, files in found.items():
        assert distribution in always, (distribution, sorted(files))


def test_dependencies_of_rig_and_spark_jobs_are_in_extras() -> None:
    chaos = declared(None) | declared("chaos")
    for distribution, files in third_party("jepsen_like").items():
        of_proxies = distribution in declared("proxy") and files == {GRPC_CALLS}
        assert distribution in chaos or of_proxies, (distribution, sorted(files))
    for distribution, files in third_party("spark_jobs").items():
        assert distribution in chaos | declared("spark"), (distribution, sorted(files))


def test_every_declared_distribution_is_imported_somewhere() -> None:
    used = set().union(*(third_party(package) for package in PACKAGES))
    asked = declared(None).union(*(declared(extra) for extra in PROJECT["optional-dependencies"]))
    assert asked <= used


def test_every_declared_distribution_has_an_exact_version() -> None:
    exact = {
        canonicalize_name(Requirement(line).name)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    asked = declared(None).union(*(declared(extra) for extra in PROJECT["optional-dependencies"]))
    assert asked - exact == set()
