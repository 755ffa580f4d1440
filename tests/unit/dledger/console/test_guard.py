"""What keeps a console from being used by others."""

import re
from pathlib import Path

import pytest
import trio
from starlette.requests import Request
from starlette.types import Message
from structlog.testing import capture_logs

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientConfig
from dledger.commitlog.errors import ConfigError, MQError
from dledger.console.command import check_binding
from dledger.console.console import ConsoleSettings, Form
from dledger.console.guard import FORM_BYTES_MAX, SESSION_MS, SESSIONS_MAX, Sessions, foreign_origin
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.signature import Credentials
from dledger.testing import ManualClock
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World
from tests.unit.dledger.console.conftest import HERE, Visitor, visible, visiting

ACCOUNT = Credentials("operator", "a-long-secret")


def test_an_account_is_signed_out_after_its_time() -> None:
    clock = ManualClock()
    sessions = Sessions(clock, rng_stream(1))
    session = sessions.sign_in(ACCOUNT)
    assert sessions.account(session) == ACCOUNT
    clock.now_s = (SESSION_MS - 1) / 1000
    assert sessions.account(session) == ACCOUNT
    clock.now_s = SESSION_MS / 1000
    assert sessions.account(session) is None
    signed_in = sessions.sign_in(ACCOUNT)
    sessions.sign_out(signed_in)
    assert sessions.account(signed_in) is None


def test_the_oldest_account_makes_way_at_the_limit() -> None:
    sessions = Sessions(ManualClock(), rng_stream(1))
    first, second = sessions.sign_in(ACCOUNT), sessions.sign_in(ACCOUNT)
    for _ in range(SESSIONS_MAX - 1):
        sessions.sign_in(ACCOUNT)
    assert sessions.account(first) is None
    assert sessions.account(second) == ACCOUNT


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({"host": "127.0.0.1:8180"}, "an unknown site"),
        ({"host": "127.0.0.1:8180", "sec-fetch-site": "same-origin"}, None),
        ({"host": "127.0.0.1:8180", "origin": HERE}, None),
        ({"host": "127.0.0.1:8180", "sec-fetch-site": "none"}, "none"),
        ({"host": "127.0.0.1:8180", "origin": HERE, "sec-fetch-site": "same-origin"}, None),
        ({"host": "a:1", "origin": "http://a:2"}, "http://a:2"),
        ({"host": "a:1", "origin": "null"}, "null"),
        ({"host": "a:1", "sec-fetch-site": "cross-site"}, "cross-site"),
        ({"host": "a:1", "origin": "http://b", "sec-fetch-site": "same-site"}, "http://b"),
    ],
)
def test_a_form_of_another_site_is_recognised(headers: dict[str, str], origin: str | None) -> None:
    assert foreign_origin(headers) == origin


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_certificate(host: str) -> None:
    check_binding(host, None, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "console.example"])
def test_a_network_needs_a_certificate(host: str) -> None:
    with pytest.raises(ConfigError, match="tls-cert-file"):
        check_binding(host, None, None)
    check_binding(host, Path("cert"), Path("key"))
    check_binding(host, None, None, plain_http=True)
    with pytest.raises(ConfigError, match="go together"):
        check_binding(host, Path("cert"), None)


async def test_a_name_that_points_here_is_refused(visitor: Visitor) -> None:
    answer = await visitor.get("/cluster", headers={"host": "rebound.example:8180"})
    assert answer.status_code == 400
    assert "Broker group" not in answer.text
    for host in ("localhost:8180", "127.0.0.1", "[::1]:8180"):
        assert (await visitor.get("/cluster", headers={"host": host})).status_code == 200, host


@pytest.mark.parametrize("path", ["/cluster", "/static/live.js", "/nosuch", "/topic?name=x"])
async def test_every_answer_runs_own_scripts_alone(visitor: Visitor, path: str) -> None:
    answer = await visitor.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    if "text/html" in answer.headers["content-type"]:
        assert "<script>" not in answer.text
        assert "style=" not in answer.text
        assert not re.search(r"""(src|href|action)=.?https?:""", answer.text)
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie


@pytest.mark.parametrize("headers", [{}, {"origin": "http://127.0.0.1:9999"}])
async def test_a_form_of_another_page_changes_nothing(
    world: World, visitor: Visitor, headers: dict[str, str]
) -> None:
    with_access_control(world, b"false")
    fields = {"name": "new", "queues": "4"}
    answer = await visitor.http.post("/topic/create", data=fields, headers=headers)
    assert answer.status_code == 403
    assert "sent this form: refused" in visible(answer)
    assert world.count(RequestCode.UPDATE_AND_CREATE_TOPIC) == 0
    assert not visitor.console.notes


async def test_a_form_that_is_too_large_is_refused(visitor: Visitor) -> None:
    answer = await visitor.post("/topic/create", name="x" * FORM_BYTES_MAX)
    assert answer.status_code == 413


async def test_a_form_is_never_sent_by_a_link(visitor: Visitor) -> None:
    for path in ("/topic/create", "/topic/delete", "/group/reset", "/cluster/transfer"):
        assert (await visitor.get(path)).status_code == 405, path


def with_access_control(world: World, value: bytes) -> None:
    world.group.on(RequestCode.GET_BROKER_CONFIG, fixed(body=b"aclEnable=" + value))


async def test_a_console_that_only_shows_changes_nothing(world: World) -> None:
    with_access_control(world, b"false")
    async with world.client() as client, visiting(client, ConsoleSettings()) as visitor:
        answer = await visitor.post("/topic/create", name="new", queues="4")
        change = visitor.note
        assert "--allow-changes" in visible(await visitor.get(answer.headers["location"]))
        assert "--allow-changes" not in visible(await visitor.get("/topics"))
        assert world.count(RequestCode.UPDATE_AND_CREATE_TOPIC) == 0
        assert not change.is_done
        page = await visitor.get("/topics")
        assert 'method="post"' not in page.text


async def test_access_control_wants_an_account(world: World, visitor: Visitor) -> None:
    with_access_control(world, b"true")
    await visitor.post("/topic/create", name="new", queues="4")
    change = visitor.note
    assert not change.is_done
    assert "sign in" in change.remark
    assert world.count(RequestCode.UPDATE_AND_CREATE_TOPIC) == 0


async def test_settings_that_are_refused_mean_access_control(
    world: World, visitor: Visitor
) -> None:
    world.group.on(RequestCode.GET_BROKER_CONFIG, fixed(ResponseCode.NO_PERMISSION, "no account"))
    assert await visitor.console.access_control() is True


async def test_brokers_that_do_not_answer_allow_nothing(world: World, visitor: Visitor) -> None:
    await visitor.post("/topic/create", name="new", queues="4")
    change = visitor.note
    assert "access control" in change.remark
    assert world.count(RequestCode.UPDATE_AND_CREATE_TOPIC) == 0


async def test_a_change_is_logged_with_its_author(world: World, visitor: Visitor) -> None:
    with_access_control(world, b"false")
    with capture_logs() as logged:
        answer = await visitor.post("/topic/create", name="new", queues="4")
    assert answer.status_code == 303
    assert world.group.topics["new"] == 4
    assert visitor.note.is_done
    (change,) = [line for line in logged if line["event"] == "console_change"]
    assert (change["what"], change["who"]) == ("create topic new", "no account from 127.0.0.1")


async def test_notes_are_bounded(world: World, visitor: Visitor) -> None:
    for number in range(SESSIONS_MAX + 2):
        visitor.console.record(
            own_form(), str(number), "create topic t", "done", is_done=True, who="operator"
        )
    assert len(visitor.console.notes) == SESSIONS_MAX


async def test_a_change_is_signed_by_the_account(world: World, visitor: Visitor) -> None:
    with_access_control(world, b"true")
    session = visitor.console.sessions.sign_in(ACCOUNT)
    visitor.http.cookies.set("dledger_console", session, domain="127.0.0.1")
    with capture_logs() as logged:
        await visitor.http.post(
            "/topic/create", data={"name": "new", "queues": "4"}, headers={"origin": HERE}
        )
    assert visitor.note.is_done, visitor.note
    (change,) = [line for line in logged if line["event"] == "console_change"]
    assert change["who"].startswith("operator from")
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_TOPIC]
    assert asked["AccessKey"] == "operator"
    assert ClientConfig().credentials is None


async def _empty() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def own_form() -> Request:
    """Return the request of an empty form of a page of ours."""
    headers = [(b"origin", HERE.encode()), (b"host", HERE.partition("://")[2].encode())]
    scope = {"type": "http", "headers": headers, "client": ("127.0.0.1", 1)}
    return Request(scope, _empty)


class Failing(BaseException):
    """Stands for what ends a request from outside."""


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), ExceptionGroup("two calls", [MQError("a"), MQError("b")]), Failing()],
    ids=lambda error: type(error).__name__,
)
async def test_change_that_fails_is_logged_as_unknown(
    world: World, visitor: Visitor, error: BaseException
) -> None:
    with_access_control(world, b"false")
    await visitor.get("/topics")

    async def act(admin: Admin, form: Form) -> str:
        raise error

    with pytest.raises(type(error)):
        await visitor.console.change(own_form(), lambda _: "create topic new", lambda _: "/", act)
    change = visitor.note
    assert not change.is_done
    assert change.what == "create topic new"
    assert change.remark == "the console failed: it may be done or not"


async def test_change_that_is_cut_off_is_logged_as_unknown(world: World, visitor: Visitor) -> None:
    with_access_control(world, b"false")
    await visitor.get("/topics")
    with trio.CancelScope() as scope:

        async def act(admin: Admin, form: Form) -> str:
            scope.cancel()
            await trio.sleep_forever()
            raise AssertionError

        await visitor.console.change(own_form(), lambda _: "create topic new", lambda _: "/", act)
    assert scope.cancelled_caught
    change = visitor.note
    assert not change.is_done
    assert "it may be done or not" in change.remark
