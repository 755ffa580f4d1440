"""What lies where: packages, dependencies, exact versions, and what the tree must not hold."""

import ast
import importlib
import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tests.harness.present import present
from tests.harness.shipped_files import ROOT

PACKAGES = ("commitlog", "remoting", "client", "namesrv", "dledger", "jepsen_like", "spark_jobs")
TOP_LEVEL = {
    *PACKAGES,
    "deploy",
    "tests",
    "tools",
    "docs",
    "examples",
    "typings",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "mkdocs.yml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
}
MADE_BY_TOOLS = {"build", "dist", "runs", "sim-failures", "store"}
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".conf", ".txt", ".svg", ".sh", ".yml", ".yaml", ""}
# In two parts, so that this file does not hold what it searches.
INDEX_ADDRESSES = ("pypi" + ".org", "python" + "hosted", "index" + "-url", "/sim" + "ple/")
WORKPLACE = ("/wo" + "rk/", "../sha" + "red", "hel" + "per sess" + "ion", "iss" + "ue #")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    match = present(re.match(r"[A-Za-z0-9._-]+", requirement))
    return normal(match.group())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {name_of(requirement) for requirement in requirements}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    return {normal(name): version for name, version in pairs}


def tree() -> list[Path]:
    """Return the text files of the project, without what tools leave behind."""
    return [
        path
        for top in sorted(ROOT.iterdir())
        if top.name in TOP_LEVEL | {".ci", ".gitignore"}
        for path in ([top] if top.is_file() else sorted(top.rglob("*")))
        if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
    ]


def test_the_top_level_has_its_packages_and_no_other() -> None:
    found = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".")
        and path.name not in MADE_BY_TOOLS
        and path.name != "__pycache__"
        and path.suffix != ".egg-info"
    }
    assert found == TOP_LEVEL | (found & {"LICENSE"})
    with_code = {
        path.parent.name
        for path in ROOT.glob("*/*.py")
        if path != ROOT / "tests" / "conftest.py"  # for every folder of tests
    }
    assert with_code == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_loaded_from_this_repository(package: str) -> None:
    name = package if package == "dledger" else f"dledger.{package}"
    place = present(importlib.import_module(name).__file__)
    assert Path(place).resolve() == ROOT / package / "__init__.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_package_types_are_shipped(package: str) -> None:
    assert (ROOT / package / "py.typed").read_bytes() == b""


def test_layout_core_needs_nothing_for_tests_or_spark() -> None:
    table = project()["project"]
    core = table["dependencies"]
    assert "pysyncobj==0.3.17" in core
    assert {"trio", "cbor2"} <= names(core)
    extras = table["optional-dependencies"]
    assert list(extras) == ["console", "chaos", "spark", "otel", "proxy"]
    assert "pyspark" in names(extras["spark"])
    groups = project()["dependency-groups"]
    for_tests = names(groups["test"])
    assert {"pytest", "pytest-trio", "hypothesis"} <= for_tests
    assert names(core).isdisjoint(for_tests | names(extras["spark"]))
    assert names(core).isdisjoint(names(groups["lint"]) | names(groups["types"]))


def test_every_requirement_has_an_exact_version() -> None:
    table = project()
    groups = [
        requirement
        for group in table["dependency-groups"].values()
        for requirement in group
        if isinstance(requirement, str)
    ]
    wanted = names(
        table["project"]["dependencies"]
        + table["project"]["optional-dependencies"]["spark"]
        + table["build-system"]["requires"]
        + groups
    )
    assert wanted - constraints().keys() == set()


def test_what_is_installed_is_what_the_constraints_say() -> None:
    ours = normal(project()["project"]["name"])
    installed = {normal(dist.name): dist.version for dist in distributions()}
    # setuptools comes with the virtual environment of older Pythons; nothing uses it.
    others = installed.keys() - {ours, "setuptools"}
    exact = constraints()
    assert {name: installed[name] for name in others} == {name: exact.get(name) for name in others}


def test_no_index_address_stands_anywhere() -> None:
    files = tree()
    assert len(files) > 300
    found = [
        (path.relative_to(ROOT).as_posix(), address)
        for path in files
        for address in INDEX_ADDRESSES
        if address in path.read_text(errors="replace")
    ]
    assert found == []


def test_product_code_and_pages_know_nothing_of_a_workplace() -> None:
    found = [
        (path.relative_to(ROOT).as_posix(), word)
        for path in tree()
        if path.relative_to(ROOT).parts[0] != "tests"
        for word in WORKPLACE
        if word in path.read_text(errors="replace").lower()
    ]
    assert found == []


FACES = [
    ROOT / "dledger" / "__init__.py",
    ROOT / "dledger" / "aio" / "__init__.py",
    ROOT / "dledger" / "testing" / "__init__.py",
]
"""Tables of the names that users import: a module is loaded at the first use of its names."""


def test_an_init_file_holds_a_docstring_or_a_face() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    assert len(files) >= len(PACKAGES)
    for path in files:
        module = ast.parse(path.read_text())
        assert ast.get_docstring(module), path
        if path in FACES:
            imported = {node.module for node in module.body if isinstance(node, ast.ImportFrom)}
            assert imported == {"importlib", "typing"}, path
            kinds = {type(node) for node in module.body[1:]}
            assert kinds <= {ast.ImportFrom, ast.Assign, ast.Expr, ast.If, ast.FunctionDef}, path
            continue
        # One call that users write; it imports nothing before it is made.
        rest = [node.name for node in module.body[1:] if isinstance(node, ast.FunctionDef)]
        allowed = ["register"] if path == ROOT / "spark_jobs" / "__init__.py" else []
        assert (rest, len(module.body)) == (allowed, 1 + len(allowed)), path
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_folder_with_code_is_a_package_of_its_own_right() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path.parent
