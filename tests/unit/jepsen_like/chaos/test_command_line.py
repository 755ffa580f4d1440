"""What `dledger-chaos` refuses: exit status 2, one line, and what to do instead."""

import json
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest

from dledger.cli.main import main
from dledger.jepsen_like.chaos.run_command import Extras, progress_line
from dledger.jepsen_like.plans.plan import Plan, encode_plan


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line a refused command prints."""
    assert main(["chaos", *arguments]) == 2
    reported = capsys.readouterr()
    assert reported.out == ""
    (line,) = reported.err.splitlines()
    return line


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "helps"),
    [
        (("--time", "0"), "Must be > 0; see dledger chaos run --help"),
        (("--time", "-3"), "Must be > 0"),
        (("--time", "abc"), "--time"),
        (("--rate", "0"), "--rate"),
        (("--interval", "0"), "--interval"),
        (("--members", "0"), "Must be >= 1"),
        (("--members", "8"), "Must be <= 7"),
        (("--name-servers", "0"), "--name-servers"),
        (("--faults", "kil"), "see dledger-chaos list-faults"),
        (("--workload", "mixd"), "see dledger-chaos list-workloads"),
        (("--plan", "absent.json"), "--plan absent.json: No such file"),
        (("--plan", "bad.json"), "no plan"),
        (("--set", "nonsense"), "expected table.name=value"),
        (("--namesrv", "foo"), "'foo' is not host:port"),
        (("--namesrv", "h:1", "--faults", "kill"), "leave --faults away"),
        (("--faults", "kill,proxy_kill"), "give --workload grpc"),
        (("--faults", "grpc-proxies"), "which proxy_kill is for; give --workload grpc"),
        (("--workload", "grpc", "--faults", "none", "--namesrv", "h:1"), "give another --workload"),
        (("--broker-tree", "runs"), "--broker-tree: no dledger in runs"),
        (("--output", "xml"), '"table", "json"'),
        (("--name", "there"), "give another --name"),
        (("--bogus",), "Unknown option"),
    ],
)
def test_a_bad_argument_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], helps: str
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "runs" / "there").mkdir(parents=True)
    assert helps in refused(capsys, "run", *arguments)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["there"]


def test_proxies_need_their_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "dledger.jepsen_like.chaos.grpc_calls", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    line = refused(capsys, "run", "--workload", "grpc", "--faults", "proxy_kill")
    assert "needs grpc, which is not installed; pip install 'grpcio-health-checking>=" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["check", "report", "minimize"])
def test_folder_without_a_run_is_reported(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "absent is no run, here or in runs; name one" in refused(capsys, command, "absent")


def test_minimize_needs_a_violation_of_own_brokers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(encode_plan(Plan(1, 1000)))
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"verdicts": [{"checker": "x", "validity": "valid"}]}))
    assert "has no violation; minimize a run that is invalid" in refused(
        capsys, "minimize", str(tmp_path)
    )
    violations = [{"name": "lost", "subject": "t/0", "detail": "…"}]
    verdicts = [{"checker": "x", "validity": "invalid", "violations": violations}]
    result.write_text(json.dumps({"verdicts": verdicts, "extras": {"namesrv": "h:1"}}))
    assert "a foreign cluster" in refused(capsys, "minimize", str(tmp_path))
    assert "--plays" in refused(capsys, "minimize", str(tmp_path), "--plays", "0")


def test_serve_names_why_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert "absent is no folder; give the --store of a run" in refused(
        capsys, "serve", "--store", "absent"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(capsys, "serve", "--store", ".", "--port", port)
    assert f"port {port} cannot be had: Address already in use; give another --port" in line


def test_repeat_command_has_all_beside_the_plan() -> None:
    assert Extras().command(Path("p.json")) == "dledger-chaos run --plan p.json"
    all_of_it = Extras(("a.b=c d", "e.f=1"), "/other tree", "h:1;i:2", "kernel").command(
        Path("p.json")
    )
    assert all_of_it == (
        "dledger-chaos run --plan p.json --set 'a.b=c d' --set e.f=1 "
        "--broker-tree '/other tree' --namesrv 'h:1;i:2' --links kernel"
    )


def test_the_counters_of_a_run_that_goes_on() -> None:
    counts = Counter({"send_ok": 1200, "pull_ok": 34, "send_info": 5, "send_fail": 6})
    done = Counter({"kill": 2, "pause": 1, "skipped": 4})
    assert progress_line("load and faults", 12.4, counts, done) == (
        "12 s, load and faults: 1,234 ok, 5 unknown, 6 failed, 3 faults, 4 skipped"
    )
