"""``dledger group`` and ``dledger dlq``: offsets that are moved, dead letters.

What commands show: lists that repeat, ``dledger top``, tables.
"""

import io
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from rich.console import Console

from dledger.cli.commands import repeated
from dledger.cli.debug_command import (
    LOG_FILES_MAX,
    is_secret,
    packed,
    read_logs,
    tail_of,
    text_without_secrets,
    without_secrets,
)
from dledger.cli.dlq_command import chosen_queues, resend
from dledger.cli.group_command import (
    ResetGoal,
    clone_rows,
    group_info,
    group_row,
    move_rows,
    other_topics,
    reset_goal,
    reset_sentences,
)
from dledger.cli.main import main
from dledger.cli.stats_command import stats_row
from dledger.cli.top_command import Sort, TopLook, page
from dledger.client.admin.groups import OffsetMove
from dledger.client.core.errors import BrokerUnreachableError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.record import decode_record
from dledger.output import CliError, ExitCode, print_table
from dledger.remoting.protocol.bodies import (
    BrokerStatsData,
    BrokerStatsItem,
    ClientConnection,
    ConsumerConnection,
    MessageModel,
    OffsetWrapper,
    SubscriptionData,
)
from tests.unit.client.fake_cluster import World, open_world

T0, T1, U0 = (MessageQueue(topic, "g", q) for topic, q in (("T", 0), ("T", 1), ("U", 0)))
ONLINE = ConsumerConnection(
    connection_set=[ClientConnection("c1", "h:1", "JAVA", 407)],
    subscription_table={"T": SubscriptionData("T", "a"), "%RETRY%G": SubscriptionData("%RETRY%G")},
    message_model=MessageModel.CLUSTERING,
)
PROGRESS = {
    T1: OffsetWrapper(broker_offset=9, consumer_offset=4, last_timestamp=1_700_000_000_000),
    T0: OffsetWrapper(broker_offset=2, consumer_offset=2),
    U0: OffsetWrapper(broker_offset=1, consumer_offset=3),
}


@pytest.mark.parametrize(
    ("first", "last", "time", "expected"),
    [(True, False, "", 0), (False, True, "", -1), (False, False, "2026-01-31", 1769817600000)],
)
def test_where_a_reset_goes(first: bool, last: bool, time: str, expected: int) -> None:
    assert reset_goal(first, last, time) == ResetGoal(expected)


def test_a_reset_goes_to_an_offset_too() -> None:
    assert reset_goal(False, False, "", 7) == ResetGoal(-1, 7)
    for first, offset in ((True, 7), (False, -1)):
        with pytest.raises(CliError) as raised:
            reset_goal(first, False, "", offset)
        assert raised.value.exit_code is ExitCode.USAGE


def test_a_dry_run_is_not_done_at_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", "reset", "G", "T", "--earliest", "--dry-run", "--yes"]) == 2
    assert "--dry-run and --yes exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "last", "time"),
    [(False, False, ""), (True, True, ""), (True, False, "0"), (False, False, "soon")],
)
def test_a_reset_to_nowhere_or_to_two_places_is_a_usage_error(
    first: bool, last: bool, time: str
) -> None:
    with pytest.raises(CliError) as raised:
        reset_goal(first, last, time)
    assert raised.value.exit_code is ExitCode.USAGE


def test_a_group_without_members_is_shown_with_its_lag() -> None:
    assert group_row("G", None, {"T": 3, "%RETRY%G": 2}) == {
        "group": "G",
        "members": 0,
        "model": None,
        "topics": 1,
        "lag": 5,
    }
    assert group_row("G", ONLINE, {})["topics"] == 1


def test_all_of_a_group() -> None:
    found = group_info("G", ONLINE, PROGRESS, {T1: "c1"})
    assert [(q["topic"], q["queue"], q["lag"], q["member"]) for q in found["queues"]] == [
        ("T", 0, 0, None),
        ("T", 1, 5, "c1"),
        ("U", 0, 0, None),
    ]
    assert found["lag"] == 5
    assert found["queues"][1]["last_consumed"] == "2023-11-14T22:13:20.000+00:00"
    assert found["queues"][0]["last_consumed"] is None
    assert found["subscriptions"][1] == {"topic": "T", "expression": "a", "type": "TAG"}
    assert group_info("G", None, {}, {})["members"] == []


def test_reset_plan_shows_the_move_of_each_queue() -> None:
    (row,) = move_rows({T0: OffsetMove(before=7, after=3, min_offset=1, max_offset=9)})
    assert (row["before"], row["after"], row["moves_by"]) == (7, 3, -4)


@pytest.mark.parametrize(
    ("read", "advice"),
    [
        ([], "see dledger topic ls"),
        (["%RETRY%G"], "see dledger topic ls"),
        (["orders", "%RETRY%G"], "did you mean orders?"),
        (["b", "a"], "G reads a, b"),
        (list("gfedcba"), "G reads a, b, c, d, e and 2 more"),
    ],
)
def test_a_reset_of_no_topic_names_those_of_the_group(read: list[str], advice: str) -> None:
    assert other_topics("G", "ordres", read) == advice


@pytest.mark.parametrize(
    ("notified", "stored", "begins"),
    [
        (2, 0, ["2 queues: running consumers are notified"]),
        (0, 3, ["3 queues: no consumer is connected"]),
        (1, 3, ["1 queues: running", "3 queues: no consumer"]),
        (0, 0, ["nothing was changed"]),
    ],
)
def test_a_reset_names_only_what_was_done(notified: int, stored: int, begins: list[str]) -> None:
    sentences = reset_sentences(notified, stored)
    assert len(sentences) == len(begins)
    for sentence, begin in zip(sentences, begins, strict=True):
        assert sentence.startswith(begin)


def test_a_clone_of_one_topic_leaves_the_others() -> None:
    rows = clone_rows(PROGRESS, {T1: OffsetWrapper(consumer_offset=1)}, "T")
    assert [(row["queue"], row["before"], row["after"]) for row in rows] == [(0, 0, 2), (1, 1, 4)]
    assert len(clone_rows(PROGRESS, {}, None)) == 3


def test_what_came_is_the_leaders_and_what_went_is_everybodys() -> None:
    def data(per_s: float, day: int) -> BrokerStatsData:
        return BrokerStatsData(
            stats_minute=BrokerStatsItem(tps=per_s), stats_day=BrokerStatsItem(sum=day)
        )

    row = stats_row("T", "G", {"a": data(1.5, 10)}, {"a": data(1, 6), "b": data(0.25, 4)}, 3)
    assert row == {
        "topic": "T",
        "group": "G",
        "in_per_s": 1.5,
        "out_per_s": 1.25,
        "in_24h": 10,
        "out_24h": 10,
        "lag": 3,
    }


@pytest.mark.parametrize(
    ("tokens", "code", "text"),
    [
        (["group", "ls", "-n", "127.0.0.1:1"], 3, "error: "),
        (["group", "reset", "G", "T", "-n", "127.0.0.1:1"], 2, "--to-first, --to-last, --to-time"),
        (["stats", "--every-s", "0"], 2, "--every-s: above 0"),
        (["debug", "bundle", "-n", "127.0.0.1:1"], 3, "no NameServer answers"),
    ],
)
def test_errors_are_one_line(
    tokens: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert text in error


# -------------------------------------------------------------------------------- bundle


@pytest.mark.parametrize(
    "key", ["secretKey", "raft.secret_file", "client.credentials_file", "accessKey", "sslPassword"]
)
def test_settings_named_like_secrets_are_removed(key: str) -> None:
    assert is_secret(key)
    settings = {key: "hidden", "listenPort": "1", f"empty.{key}": ""}
    assert without_secrets(settings) == {key: "(removed)", "listenPort": "1", f"empty.{key}": ""}


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ('{"event":"x","secretKey":"hid den","term":4}', ['"event":"x"', '"term":4']),
        ("2026 settings raft.secret_file='hid den' term=4", ["settings", "term=4"]),
        ("accessKey: hidden, term: 4", ["term: 4"]),
        ('password = "hid den"', ["password"]),
    ],
)
def test_values_named_like_secrets_are_removed_from_logs(line: str, kept: list[str]) -> None:
    text = text_without_secrets(line)
    assert "hid" not in text
    assert "(removed)" in text
    assert all(part in text for part in kept)


def test_the_end_of_a_log_begins_with_a_whole_line() -> None:
    assert tail_of(b"one\ntwo\nthree\n", 8) == "three\n"
    assert tail_of(b"one\ntwo\n", 8) == "one\ntwo\n"


def test_logs_are_found_in_folders_and_too_many_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "n0.log").write_text("token=hidden\n")
    (tmp_path / "other.txt").write_text("not a log")
    assert read_logs([tmp_path]) == {"logs/00-n0.log": b'token="(removed)"\n'}
    with pytest.raises(CliError, match=r"no .*missing"):
        read_logs([tmp_path / "missing"])
    for number in range(LOG_FILES_MAX):
        (tmp_path / f"{number}.log").touch()
    with pytest.raises(CliError, match="65 files, at most 64"):
        read_logs([tmp_path])


def test_a_bundle_is_one_folder() -> None:
    with tarfile.open(fileobj=io.BytesIO(packed({"b": b"2", "a": b"1"}))) as archive:
        assert archive.getnames() == ["dledger-debug/a", "dledger-debug/b"]


LETTERS = "%DLQ%billing"
FIRST, SECOND = MessageQueue(LETTERS, "g", 0), MessageQueue(LETTERS, "h", 0)
THIRD = MessageQueue(LETTERS, "h", 1)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Two broker groups, "g" and "h", with three dead letters of "billing" each."""

    async with open_world() as cluster:
        monkeypatch.setattr("dledger.cli.commands.open_client", lambda _: cluster.client())
        group, other = cluster.groups["g"], await cluster.add_group("h", 1, 11_000)
        async with cluster.client() as client, Producer(client, "p") as producer:
            for number in range(3):
                message = Message("T", b"%d" % number)
                await producer.send_to(MessageQueue("T", "g", 0), message)
        for stored in list(group.queue("T", 0)):
            for each in (group, other):
                each.store(LETTERS, 0, decode_record(stored))
        for each in (group, other):
            each.topics["%RETRY%billing"] = 1
            each.register()
        yield cluster


def given_back(world: World) -> list[bytes]:
    return sorted(
        body for group in world.groups.values() for body in group.bodies("%RETRY%billing")
    )


async def test_offset_names_one_letter_of_one_queue(world: World) -> None:
    with pytest.raises(CliError, match="offset 1: in several queues, g queue 0, h queue 0; choose"):
        await resend("billing", offset=1)
    assert given_back(world) == []
    await resend("billing", offset=1, broker="h", queue=0)
    assert given_back(world) == [b"1"]


async def test_broker_names_the_letters_of_its_queues(world: World) -> None:
    await resend("billing", broker="g", max_=2)
    assert given_back(world) == [b"0", b"1"]
    await resend("billing", max_=3)
    assert given_back(world) == [b"0", b"0", b"1", b"1", b"2"]
    await resend("billing")
    assert given_back(world) == [b"0", b"0", b"1", b"1", b"2", b"2"]


async def test_group_without_dead_letters_is_named(world: World) -> None:
    with pytest.raises(CliError, match="other has no dead letters"):
        await resend("other")


def test_queues_are_chosen_by_broker_and_number() -> None:
    every = [THIRD, SECOND, FIRST]
    assert chosen_queues(every, None, None, None) == [FIRST, SECOND, THIRD]
    assert chosen_queues(every, "h", None, None) == [SECOND, THIRD]
    assert chosen_queues(every, None, 0, None) == [FIRST, SECOND]
    assert chosen_queues(every, "h", 1, 7) == [THIRD]
    assert chosen_queues([FIRST], None, None, 7) == [FIRST]
    with pytest.raises(CliError, match="no such queue"):
        chosen_queues(every, "g", 1, None)


MEMBERS = [
    {
        "group": "broker-a",
        "member": f"n{number}",
        "address": f"127.0.0.1:1091{number}",
        "role": role,
        "term": 7,
        "commit": 4711,
        "lag": lag,
    }
    for number, (role, lag) in enumerate([("leader", 0), ("follower", 12), ("unreachable", None)])
]


def row(topic: str, came: float, went: float, lag: int | None) -> dict[str, Any]:
    group = None if lag is None else "workers"
    return {"topic": topic, "group": group, "in_per_s": came, "out_per_s": went, "lag": lag}


TOPICS = [row("Audit", 1.0, 9.0, 5), row("Orders", 30.5, 2.0, 70), row("Quiet", 0.0, 0.0, None)]
LOOK = TopLook(at="12:00:01", members=MEMBERS, topics=TOPICS)


def shown(look: TopLook, *, sort: Sort = "in", height: int = 0) -> list[str]:
    console = Console(width=80, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(page(look, sort=sort, height=height))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_top_shows_each_member_and_how_many_serve() -> None:
    lines = shown(LOOK)
    assert lines[0] == "2 of 3 members serve, 12:00:01"
    (follower,) = [line.split() for line in lines if " n1 " in line]
    assert follower == ["broker-a", "n1", "127.0.0.1:10911", "follower", "7", "4711", "12"]
    (lost,) = [line.split() for line in lines if " n2 " in line]
    assert lost[3:] == ["unreachable", "7", "4711", "-"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("in", ["Orders", "Audit", "Quiet"]),
        ("out", ["Audit", "Orders", "Quiet"]),
        ("lag", ["Orders", "Audit", "Quiet"]),
    ],
)
def test_top_orders_topics_by_what_is_asked(sort: Sort, order: list[str]) -> None:
    first = [line.split()[0] for line in shown(LOOK, sort=sort) if line.strip()]
    assert [word for word in first if word in order] == order


@pytest.mark.parametrize("height", [10, 12, 24, 50])
def test_top_fits_the_screen(height: int) -> None:
    many = TopLook(
        at="12:00:01",
        members=MEMBERS * 10,
        topics=[row(f"t{number:03}", float(number), 0.0, number) for number in range(200)],
        topics_left_out=3,
        error="no NameServer answers " * 20,
    )
    lines = shown(many, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= 80
    assert "t199" in "".join(lines), "the one with the most is there"
    assert sum(" n0 " in line for line in lines) >= 1


def test_top_keeps_the_rows_when_a_look_fails() -> None:
    lines = shown(TopLook("12:00:03", MEMBERS, TOPICS, error="127.0.0.1:9876 does not answer"))
    assert lines[1] == "the last look failed: 127.0.0.1:9876 does not answer"
    assert any(line.startswith("Orders") for line in lines)


def test_top_shows_numbers_beside_long_names() -> None:
    lines = shown(TopLook("12:00:01", MEMBERS, [row("t" * 127, 12.5, 3.5, 70)]))
    (line,) = [line for line in lines if "ttt" in line]
    assert line.split()[-4:] == ["workers", "12.50", "3.50", "70"]


def test_top_escapes_names() -> None:
    lines = shown(TopLook("12:00:01", MEMBERS, [row("T\x1b[2J", 1.0, 0.0, None)]))
    assert not any("\x1b" in line for line in lines)


def looks(*ends: int | Exception) -> tuple[list[float], Callable[[], Awaitable[int]]]:
    """Return a look that ends so, one time after the other, and the times of its calls."""
    times: list[float] = []

    async def look() -> int:
        times.append(trio.current_time())
        end = ends[len(times) - 1]
        if isinstance(end, Exception):
            raise end
        return end

    return times, look


async def test_without_an_interval_there_is_one_look() -> None:
    times, look = looks(1)
    assert await repeated(look, None) == 1
    assert len(times) == 1


async def test_a_list_repeats_at_the_interval_after_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times, look = looks(0, CliError("away", exit_code=ExitCode.UNREACHABLE), 0)
    assert await repeated(look, 2.0, most=3) == 0
    assert [round(at - times[0]) for at in times] == [0, 2, 4]
    assert capsys.readouterr().err == "error: away\n"


@pytest.mark.parametrize(
    "away",
    [
        BrokerUnreachableError("away"),
        ExceptionGroup("of a nursery", [BrokerUnreachableError("away"), CliError("away, too")]),
    ],
    ids=["one", "group"],
)
async def test_a_list_goes_on_after_an_error_of_the_client(
    capsys: pytest.CaptureFixture[str], away: Exception
) -> None:
    times, look = looks(0, away, 0)
    assert await repeated(look, 2.0, most=3) == 0
    assert len(times) == 3
    assert capsys.readouterr().err == "error: away\n"


@pytest.mark.parametrize(
    "bug", [KeyError("x"), ExceptionGroup("of a nursery", [CliError("away"), KeyError("x")])]
)
async def test_a_list_ends_with_a_bug(bug: Exception) -> None:
    _, look = looks(0, bug, 0)
    with pytest.raises(type(bug)):
        await repeated(look, 2.0, most=3)


async def test_a_first_look_that_fails_ends_the_command() -> None:
    _, look = looks(CliError("away"))
    with pytest.raises(CliError, match="away"):
        await repeated(look, 1.0)


@pytest.mark.parametrize(
    "command", [["topic", "ls"], ["cluster", "ls"], ["raft", "status"], ["group", "ls"]]
)
def test_lists_take_an_interval_above_zero(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--watch", "0"]) == 2
    assert "--watch: above 0" in capsys.readouterr().err
    assert main([*command, "--help"]) == 0
    assert "--watch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "right"),
    [([1, 20], True), ([1.5, None], True), ([None, None], False), ([True, False], False)],
)
def test_print_table_aligns_numbers_and_gaps(
    capsys: pytest.CaptureFixture[str], values: list[object], right: bool
) -> None:
    print_table("", ["number", "name"], [[value, "n0"] for value in values])
    rows = [line for line in capsys.readouterr().out.splitlines() if "n0" in line]
    cells = [line.split("│")[1] for line in rows]
    assert len(cells) == 2
    assert all(cell.startswith("  ") == right for cell in cells)
