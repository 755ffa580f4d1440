"""The command line: help, settings, errors in one line, exit codes."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import structlog
from cyclopts import App, Argument, ArgumentCollection

from dledger.cli.cluster_command import BROKER_COLUMNS, judge_group, missing_groups, with_absent
from dledger.cli.main import (
    COMMANDS,
    broker_main,
    build_app,
    exit_code_of,
    main,
    run,
    take_access_options,
)
from dledger.cli.raft_command import COLUMNS, group_title, narrow_row, raft_rows, refused_members
from dledger.client.core.errors import NoNameServerError
from dledger.commitlog.errors import ConfigError, InvariantBroken
from dledger.output import CliError, ExitCode, show
from dledger.remoting.log import LogForm, configure_logs
from dledger.settings.config import SETTINGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, _, _, about in COMMANDS:
        assert name in out
        assert about in out
    assert "namesrv" in out


@pytest.mark.parametrize("name", [name for name, _, _, _ in COMMANDS])
def test_every_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"dledger {name}" in capsys.readouterr().out


def test_what_checks_does_not_stand_under_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    run_part, checks = capsys.readouterr().out.split("\nRun:")[1].split("\nCheck and measure:")
    for name in ("check", "audit", "chaos", "history", "sim"):
        assert f"\n  {name}: " in checks
        assert f"\n  {name}: " not in run_part
    assert "\n  namesrv: " in run_part
    assert main(["history", "--help"]) == 0
    assert "Measure how fast histories are checked." in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["", "topic", "group", "cluster", "raft", "config", "send", "msg", "log", "stats"]
)
def test_help_loads_nothing_that_only_the_command_needs(command: str) -> None:
    heavy = ("numpy", "structlog", "trio", "client", "pysyncobj", "asyncio", "importlib.metadata")
    code = (
        f"import sys; from dledger.cli.main import main; main({[*command.split(), '--help']});"
        f"bad = [m for m in {heavy} if m in sys.modules];"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("tokens", "code", "text"),
    [
        (["nothing"], 2, 'Unknown command "nothing"'),
        (["broker", "--nothing"], 2, "Unknown option: --nothing"),
        (["broker", "-c", "/missing.toml"], 2, "/missing.toml: cannot be read: No such file"),
        (["broker", "--set", "raft"], 2, "--set raft: expected table.name=value"),
        (["broker", "--set", "raft.peer=1"], 2, "unknown setting raft.peer (did you mean"),
        (["broker", "--listen-port", "ten"], 2, "--listen-port"),
        (["cluster", "ls", "-n", "127.0.0.1:1"], 3, "no connection to 127.0.0.1:1"),
        (["cluster", "ls", "-n", f"{'a' * 64}:1"], 3, "no connection to"),
        (["cluster", "health", "-n", "127.0.0.1:1", "-o", "json"], 3, "no connection to"),
        (["acl", "ls"], 2, "which accounts? give --file, DLEDGER_ACL_FILE in the"),
        (["cluster", "health", "--wait", "--timeout-s", "-1"], 2, "--timeout-s"),
        (["cluster", "health", "--wait", "--timeout-s", "nan"], 2, "--timeout-s"),
        (["stats", "--every-s", "nan"], 2, "--every-s"),
        (["top", "--every-s", "nan"], 2, "--every-s"),
        (["topic", "ls", "--watch", "nan"], 2, "--watch"),
        (["bench", "produce", "--duration", "nan"], 2, "--duration"),
        (["raft", "status", "-n", "nonsense"], 2, "'nonsense' is not host:port"),
        (["demo", "--brokers", "2"], 2, "--brokers: 3 or 5"),
        (["up", "--brokers", "6"], 2, "--brokers: from 1 to 5"),
        (["up", "--port", "65536"], 2, "--port"),
        (["up", "--port", "0"], 2, "--port"),
        (["console", "--port", "65536"], 2, "--port"),
        (["up", "--brokers", "2.7"], 2, "--brokers: '2.7' is no whole number"),
        (["up", "--brokers", "three"], 2, "--brokers: 'three' is no whole number"),
    ],
)
def test_error_is_one_line_with_its_exit_code(
    tokens: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert text in err


def test_every_mistake_of_a_configuration_has_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("listenPort=ten\n\nzzz=1\n")
    assert main(["broker", "-c", str(file)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {file}:1: listenPort = 'ten'")
    assert second == f"error: {file}:3: unknown setting zzz"
    assert main(["namesrv", "-c", str(file)]) == 2
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == [
        f"{file}:1",
        f"{file}:3",
    ]


def test_p_prints_every_setting_with_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876;10.0.0.2:9876")
    monkeypatch.setenv("HOME", "/home/mq")
    monkeypatch.chdir(tmp_path)
    Path("n1.toml").write_text(
        '[broker]\nbroker_name = "broker-a"\n[raft]\nself_id = "n1"\n'
        'peers = "n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913"\n'
    )
    Path("broker.conf").write_text("deleteWhen=04;16\nflushDiskType=ASYNC_FLUSH\n")
    tokens = ["-c", "n1.toml", "-c", "broker.conf", "--listen-port", "10921", "-p"]
    assert broker_main(tokens) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{'broker.cluster_name':<40} = {'DefaultCluster':<48}  # default\n")
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows] == list(SETTINGS)
    shown = {row[0]: " ".join(row[1:]) for row in rows}
    assert {path: line for path, line in shown.items() if not line.endswith("# default")} == {
        "broker.broker_name": "= broker-a # n1.toml",
        "broker.broker_ip1": "= 127.0.0.1 # from server.listen_host",
        "broker.namesrv_addr": "= 10.0.0.1:9876;10.0.0.2:9876 # environment NAMESRV_ADDR",
        "server.listen_host": "= 127.0.0.1 # from raft.peers",
        "server.listen_port": "= 10921 # command line",
        "store.flush_disk_type": "= ASYNC_FLUSH # broker.conf",
        "store.delete_when": "= 04;16 # broker.conf",
        "raft.group": "= broker-a # from broker.broker_name",
        "raft.self_id": "= n1 # n1.toml",
        "raft.peers": "= n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913 # n1.toml",
    }


def _commands(app: App, *path: str) -> Iterator[tuple[tuple[str, ...], ArgumentCollection]]:
    for name in app:
        if name.startswith("-"):
            continue
        command = app[name]
        if command.default_command is not None:
            yield (*path, name), command.assemble_argument_collection()
        yield from _commands(command, *path, name)


def _takes_whole_numbers(argument: Argument) -> bool:
    return argument.hint is int or int in get_args(argument.hint)


@pytest.mark.parametrize("text", ["1.5", "1_0", "\u0661", "0x10"])
def test_whole_numbers_are_ascii_digits(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """So they are in every option and argument of every command."""
    app, seen = build_app(), 0
    for path, arguments in _commands(app):
        for tried in filter(_takes_whole_numbers, arguments):
            tokens = list(path)
            for argument in arguments:
                value = text if argument is tried else "1"
                if argument.names[0].startswith("--"):
                    if argument is tried or argument.required:
                        tokens.append(f"{argument.names[0]}={value}")
                elif argument.required:
                    tokens.append(value)
            assert run(app, tokens) == ExitCode.USAGE, tokens
            name = f"{tried.names[0]}: " if tried.names[0].startswith("--") else ""
            assert f"{name}{text!r} is no whole number" in capsys.readouterr().err, tokens
            seen += 1
    assert seen > 70


def test_a_script_is_its_sub_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert broker_main(["-p"]) == main(["broker", "-p"]) == 0
    first, second = capsys.readouterr().out.split("broker.cluster_name")[1:]
    assert first == second


def test_exit_codes_mean_something() -> None:
    from dledger.client.core.errors import BrokerRefusedError

    assert exit_code_of(ConfigError("x")) == 2
    assert exit_code_of(CliError("x")) == 1
    assert exit_code_of(CliError("x", exit_code=ExitCode.UNREACHABLE)) == 3
    assert exit_code_of(NoNameServerError("x")) == 3
    assert exit_code_of(BrokerRefusedError("x", code=1)) == 1
    assert exit_code_of(OSError("x")) == 1


def test_errors_out_of_a_nursery_are_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    app = build_app()

    @app.command
    def fail() -> None:
        raise ExceptionGroup("x", [ExceptionGroup("y", [ConfigError("two\nlines")])])

    assert run(app, ["fail"]) == 2
    assert capsys.readouterr().err == "error: two lines\n"


@pytest.mark.parametrize("bug", [InvariantBroken("x"), ZeroDivisionError()])
def test_a_bug_is_not_dressed_up_as_an_error_of_the_user(bug: Exception) -> None:
    app = build_app()

    @app.command
    def fail() -> None:
        raise ExceptionGroup("x", [bug])

    with pytest.raises(ExceptionGroup):
        run(app, ["fail"])


PRINT_UNTIL_NOBODY_READS = """
import sys, trio
from dledger.cli.main import build_app, run
from dledger.output import print_table
app = build_app()
@app.command
async def chatter():
    async def talk():
        while True:
            {line}
            await trio.lowlevel.checkpoint()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
sys.exit(run(app, ["chatter"]))
"""


@pytest.mark.parametrize("line", ["print('a line')", "print_table('a line', ['x'], [[1]])"])
def test_a_reader_that_has_enough_ends_a_command_without_a_word(line: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_UNTIL_NOBODY_READS.format(line=line)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"a line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def row(**changes: object) -> dict[str, object]:
    """The status of one member of a healthy group of two."""
    healthy: dict[str, object] = {
        "broker": "a", "id": 0, "address": "h:1", "reachable": True, "self": "n0", "serving": True,
        "term": 3, "commit_index": 9, "applied_index": 9, "voter": True,
        "peers": {"n1": {}},
    }  # fmt: skip
    return {**healthy, **changes}


def follower(**changes: object) -> dict[str, object]:
    """The status of the other one."""
    base: dict[str, object] = {
        "id": 2, "address": "h:2", "self": "n1", "serving": False,
        "peers": {"n0": {}},
    }  # fmt: skip
    return row(**{**base, **changes})


def test_group_with_all_members_current_is_healthy() -> None:
    health = judge_group("a", [row(), follower()])
    assert (health.healthy, health.leader, health.term, health.members) == (True, "h:1", 3, 2)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(serving=False), follower()], "no leader"),
        ([row(), follower(reachable=False)], "h:2 does not answer"),
        ([row(id=1), follower()], "the NameServer does not know yet that h:1 leads"),
        ([row()], "n1 of the group not registered"),
        ([row(), follower(applied_index=4)], "h:2 is 5 entries behind"),
        ([row(), follower(voter=False)], "h:2 must not vote"),
        ([row(), follower(term=4)], "no leader"),
        (
            [row(group_identity="aa"), follower(group_identity="bb")],
            "2 groups have this name: aa, bb",
        ),
        (
            [row(), follower(registration_refused={"ns:1": "it belongs to the group aa"})],
            "NameServer ns:1 refuses h:2: it belongs to the group aa",
        ),
    ],
)
def test_unhealthy_group_names_its_reasons(rows: list[dict[str, object]], reason: str) -> None:
    health = judge_group("a", list(rows))
    assert not health.healthy
    assert reason in health.reasons


def test_missing_groups_are_counted() -> None:
    assert missing_groups(0, 1) == ["no broker is registered"]
    assert missing_groups(1, 1) == missing_groups(3, 2) == []
    assert missing_groups(1, 2) == ["1 of 2 groups registered"]


def test_log_lines_are_json_with_the_node() -> None:
    out = io.StringIO()
    configure_logs(stream=out, node_id="n0", group="a")
    try:
        log = structlog.get_logger("x").bind(peer="n1")
        log.info("role_changed", term=4, role="leader")
        log.debug("too_much")
        try:
            raise ConfigError("why")
        except ConfigError:
            log.exception("failed")
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.reset_defaults()
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "role_changed", "level": "info", "node_id": "n0", "group": "a", "peer": "n1",
        "term": 4, "role": "leader",
    }  # fmt: skip
    assert "ConfigError: why" in second["exception"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_traceback_in_a_log_has_no_local_variables(form: LogForm) -> None:
    out = io.StringIO()
    configure_logs(form=form, stream=out)
    try:
        secret = "card-number"
        try:
            raise ConfigError("why")
        except ConfigError:
            structlog.get_logger().exception("failed")
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.reset_defaults()
    assert "ConfigError: why" in out.getvalue()
    assert secret not in out.getvalue()


def test_tls_on_one_side_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    app = build_app()

    @app.command
    def fail(said: str) -> None:
        raise CliError(said)

    assert run(app, ["fail", "connection to h:1 ended (reset) before the answer to request 3"]) == 1
    assert "it may talk TLS: dledger --tls-ca-file FILE" in capsys.readouterr().err
    assert run(app, ["fail", "TLS handshake with h:1 failed: EOF"]) == 1
    assert "it may talk no TLS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file", "/proc/x"), "/proc/x: No such file"),
        (OSError(98, "Address already in use"), "Address already in use"),
        (OSError("other"), "other"),
    ],
)
def test_os_error_is_shown_without_its_number(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = build_app()

    @app.command
    def fail() -> None:
        raise error

    assert run(app, ["fail"]) == 1
    assert capsys.readouterr().err == f"error: {said}\n"


def test_an_empty_table_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    show("table", "Members", [], ("a",))
    show("table", "", [], ("a",))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Members: none\nthere is nothing to show\n")
    show("json", "Members", [], ("a",))
    assert json.loads(capsys.readouterr().out) == []


def test_a_member_is_shown_with_what_it_may_do() -> None:
    members = [{"name": "n0", "standing": "voter"}, {"name": "n1", "standing": "learner"}]
    says: list[dict[str, object]] = [
        row(members=members),
        follower(voter=False, members=members),
        follower(self="n2", voter=False, members=members),
        {"broker": "a", "address": "h:9", "role": "unreachable"},
    ]
    assert [shown["standing"] for shown in raft_rows(says)] == [
        *("voter", "learner", "no member", None)
    ]


MEMBERS = [
    {"name": "n0", "standing": "voter", "client_address": "h:1"},
    {"name": "n1", "standing": "voter", "client_address": "h:2"},
    {"name": "n2", "standing": "voter", "client_address": "h:3", "address": "h:33"},
    {"name": "n3", "standing": "learner", "address": "h:44"},
]


def test_a_dead_member_is_shown_listed_or_not() -> None:
    silent = {"broker": "a", "id": 3, "address": "h:3", "reachable": False, "role": "unreachable"}
    rows = with_absent([row(members=MEMBERS, role="leader"), follower(role="follower"), silent])
    shown = [(one["self"], one["address"], one["role"]) for one in rows]
    assert shown == [
        ("n0", "h:1", "leader"),
        ("n1", "h:2", "follower"),
        ("n2", "h:3", "unreachable"),
        ("n3", "h:44", "absent"),
    ]
    members = raft_rows(rows)
    assert [member["member"] for member in members] == ["n0", "n1", "n2", "n3"]
    assert {member["group"] for member in members} == {"a"}


def test_raft_status_shows_identity_and_refusals() -> None:
    says: list[dict[str, object]] = [
        row(group_identity="0f" * 16),
        follower(
            group_identity="0f" * 16, registration_refused={"ns:9876": "it belongs to the group e1"}
        ),
        {"broker": "a", "address": "h:9", "role": "unreachable"},
    ]
    members = raft_rows(says)
    assert group_title("a", members) == f"Group a {'0f' * 16}"
    (sentence,) = refused_members(members)
    assert sentence == "NameServer ns:9876 refuses n1: it belongs to the group e1"
    assert group_title("a", raft_rows(says[2:])) == "Group a"


def test_a_group_whose_members_are_all_there_has_no_row_more() -> None:
    rows = [row(members=MEMBERS[:2]), follower(members=MEMBERS[:2])]
    assert with_absent(rows) == rows


@pytest.mark.parametrize("columns", [COLUMNS, BROKER_COLUMNS])
def test_tables_of_members_fit_into_80_columns(
    columns: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda _: True))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    large = 12_345_678
    says = row(
        cluster="DefaultCluster", broker="broker-a", members=MEMBERS, role="leader",
        address="127.0.0.1:10911", term=123, last_index=large, commit_index=large,
        applied_index=large,
    )  # fmt: skip
    rows = with_absent([says])
    shown = [narrow_row(one) for one in raft_rows(rows)] if columns is COLUMNS else rows
    show("table", "", shown, columns)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in (*columns, "127.0.0.1:10911", "absent", "123"):
        assert word in out
    assert out.count("\n") == len(rows) + 4, "no cell is wrapped"


def test_members_are_those_of_the_leaders_list() -> None:
    members = [{"name": "n0", "standing": "voter"}, {"name": "n1", "standing": "voter"}]
    health = judge_group("a", [row(members=members, peers={"n1": {}, "gone": {}}), follower()])
    assert (health.healthy, health.members) == (True, 2)


@pytest.mark.parametrize(
    ("tokens", "rest", "environment"),
    [
        (["topic", "ls"], ["topic", "ls"], {}),
        (["--credentials", "c", "topic"], ["topic"], {"DLEDGER_CREDENTIALS": "c"}),
        (
            ["--credentials=c", "--tls-ca-file", "t", "x", "--credentials", "d"],
            ["x", "--credentials", "d"],
            {"DLEDGER_CREDENTIALS": "c", "DLEDGER_TLS_CA_FILE": "t"},
        ),
    ],
)
def test_options_before_the_command_give_credentials(
    tokens: list[str], rest: list[str], environment: dict[str, str]
) -> None:
    found: dict[str, str] = {}
    assert take_access_options(tokens, found) == rest
    assert found == environment


def test_credentials_without_a_file_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--credentials"]) == 2
    assert "--credentials needs a file" in capsys.readouterr().err


def test_the_package_can_be_run_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dledger", "raft", "--nonsense"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith('error: Unknown command "--nonsense"')


def test_help_wraps_a_text_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["group", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    (number,) = (n for n, line in enumerate(lines) if line.startswith("  reset: Move"))
    assert lines[number + 1] == "      not."
    assert main(["group", "reset", "--help"]) == 0
    assert "The\nbroker notifies running consumers;" in capsys.readouterr().out


def test_completion_does_without_extras(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    kept = [command for command in COMMANDS if command[0] in ("topic", "completion")]
    lacking = ("weighs", "dledger.none:app", kept[0][2], "Lacks an extra.")
    monkeypatch.setattr("dledger.cli.main.COMMANDS", [*kept, lacking])
    assert main(["completion", "bash"]) == 0
    printed = capsys.readouterr().out
    assert "retention" in printed
    assert "weighs" in printed
