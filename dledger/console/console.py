"""What all pages share: the client of the cluster, the watch over it, templates, and changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

import jinja2
import structlog
import trio
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.trace import TRACE_TOPIC
from dledger.commitlog.errors import MQError
from dledger.console import texts
from dledger.console.cluster_look import ClusterLook, look_at
from dledger.console.cluster_watch import LOOK_EVERY_S, ClusterWatch
from dledger.console.guard import (
    FORM_BYTES_MAX,
    SESSION_COOKIE,
    SESSION_MS,
    TOKEN_FIELD,
    Sessions,
    foreign_origin,
)
from dledger.console.known import is_access_refusal, sentence
from dledger.remoting.protocol.signature import Credentials

CHANGE_S: Final = 30.0
"""A change may wait for a new leader and for its commit."""

CHANGES_KEPT: Final = 500
"""Shown on the page; the log has all of them."""

Form = Mapping[str, str]
Act = Callable[[Admin, Form], Awaitable[str]]

PAGES: Final = (
    ("/cluster", "Cluster"),
    ("/topics", "Topics"),
    ("/groups", "Consumer groups"),
    ("/messages", "Messages"),
    ("/dead-letters", "Dead letters"),
    ("/waiting", "Delayed"),
    ("/clients", "Clients"),
    ("/settings", "Settings"),
    ("/accounts", "Accounts"),
    ("/runs", "Fault runs"),
    ("/changes", "Changes"),
)
"""Address and name of every page in the navigation."""

logger = structlog.get_logger(__name__)


class RefusedError(MQError):
    """A change that this console does not carry out; nothing was done.

    Args:
        message: Why.
        status: HTTP status of the answer.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Change:
    """One change that was asked for.

    Attributes:
        number: Counts from 1 since the console began.
        at_ms: When it ended.
        who: The account and the address it came from.
        what: What was to be done, in a few words.
        is_done: It was carried out; otherwise it was refused, or its outcome is not known.
        remark: What came of it.
    """

    number: int
    at_ms: int
    who: str
    what: str
    is_done: bool
    remark: str


class ChangeLog:
    """Logs each change, and keeps the newest for the page."""

    def __init__(self) -> None:
        self.newest: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self._count = 0

    def record(self, at_ms: int, who: str, what: str, *, is_done: bool, remark: str) -> Change:
        """Log a change and return it."""
        self._count += 1
        change = Change(self._count, at_ms, who, what, is_done, remark)
        self.newest.appendleft(change)
        log = logger.info if is_done else logger.warning
        log("console_change", who=who, what=what, is_done=is_done, remark=remark)
        return change

    def find(self, number: str | None) -> Change | None:
        """Return a change by its number as a page's address has it; None: there is none."""
        return next((each for each in self.newest if str(each.number) == number), None)


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """How a console was started.

    Attributes:
        allow_changes: Forms are there, and what they send is carried out.
        runs: Folder with runs of fault injection; None: there is none.
        trace_topic: Where clients send message trace.
        is_secure: Browsers reach it by https: cookies say so.
    """

    allow_changes: bool = False
    runs: Path | None = None
    is_secure: bool = False
    trace_topic: str = TRACE_TOPIC


@dataclass(slots=True)
class Console:
    """The parts of one console.

    Attributes:
        client: Open while the console serves.
        open_client: Makes a client with other credentials, not yet open.
    """

    client: ClientInstance
    open_client: Callable[[ClientConfig], ClientInstance]
    settings: ConsoleSettings = field(default_factory=ConsoleSettings)
    watch: ClusterWatch = field(default_factory=ClusterWatch)
    changes: ChangeLog = field(default_factory=ChangeLog)
    sessions: Sessions = field(init=False)
    _templates: jinja2.Environment = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.client.clock, self.client.rng)
        self._templates = templates()

    @property
    def admin(self) -> Admin:
        """Administration with the console's own account, for reading."""
        return Admin(self.client)

    @property
    def now_ms(self) -> int:
        """The time, ms since the epoch."""
        return self.client.clock.wall_ms()

    async def look(self) -> ClusterLook:
        """Look at the cluster now, and return what was seen."""
        look = await look_at(self.admin, self.watch.look, self.now_ms)
        self.watch.take(look)
        return look

    async def keep_looking(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await self.client.clock.sleep(LOOK_EVERY_S)

    async def newest_look(self) -> ClusterLook:
        """Return the newest look; takes one if there is none yet."""
        return self.watch.look or await self.look()

    # ------------------------------------------------------------------------------- pages

    def session_of(self, request: Request) -> str:
        """Return the session of a browser; a new one where it brings none."""
        known: str | None = getattr(request.state, "session", None)
        if known is None:
            known = request.cookies.get(SESSION_COOKIE) or self.sessions.new_id()
            request.state.session = known
        return known

    def page(
        self,
        request: Request,
        template: str,
        title: str,
        *,
        status: int = 200,
        problems: list[str] | None = None,
        **values: Any,
    ) -> Response:
        """Return a page.

        Args:
            problems: What is not known, a sentence each; shown above everything else.
        """
        session = self.session_of(request)
        account = self.sessions.account(session)
        body = self._templates.get_template(template).render(
            title=title,
            pages=PAGES,
            path="/" + request.url.path.strip("/").partition("/")[0],
            problems=problems or [],
            token=self.sessions.token(session),
            account=None if account is None else account.access_key,
            allow_changes=self.settings.allow_changes,
            done=self.changes.find(request.query_params.get("done")),
            now_ms=self.now_ms,
            **values,
        )
        response = HTMLResponse(body, status)
        self.keep_session(response, session)
        return response

    def keep_session(self, response: Response, session: str) -> None:
        """Let the browser bring *session* with its next request."""
        response.set_cookie(
            SESSION_COOKIE,
            session,
            max_age=SESSION_MS // 1000,
            httponly=True,
            samesite="strict",
            secure=self.settings.is_secure,
        )

    def fragment(self, template: str, **values: Any) -> Response:
        """Return a part of a page, for the script that keeps it new."""
        return HTMLResponse(
            self._templates.get_template(template).render(now_ms=self.now_ms, **values)
        )

    # ------------------------------------------------------------------------------- changes

    async def form(self, request: Request) -> Form:
        """Return the fields of a form that one of our own pages sent.

        Raises:
            RefusedError: It is none, it is too large, or another site's page sent it.
        """
        if (origin := foreign_origin(request.headers)) is not None:
            raise RefusedError(f"a page of {origin} sent this form: refused", 403)
        stated = request.headers.get("content-length", "0")
        if not stated.isdecimal() or int(stated) > FORM_BYTES_MAX:
            raise RefusedError(f"a form has at most {FORM_BYTES_MAX} bytes", 413)
        body = bytearray()
        async with aclosing(request.stream()) as parts:
            async for part in parts:
                body += part
                if len(body) > FORM_BYTES_MAX:
                    raise RefusedError(f"a form has at most {FORM_BYTES_MAX} bytes", 413)
        fields = dict(parse_qsl(bytes(body).decode("utf-8", "replace"), keep_blank_values=True))
        session = request.cookies.get(SESSION_COOKIE, "")
        if not self.sessions.owns(session, fields.get(TOKEN_FIELD, "")):
            raise RefusedError("this form is too old: load its page again and send it again", 403)
        return fields

    async def change(
        self, request: Request, what: Callable[[Form], str], back: Callable[[Form], str], act: Act
    ) -> Response:
        """Carry out a change that a form asks for, log it, and lead to a page that shows it.

        Args:
            what: Names the change.
            back: Address of the page that shows it, without a fragment.
            act: Does it; returns what came of it.
        Raises:
            RefusedError: The form is not from a page of ours; nothing was done or logged.
            Exception: What *act* raised beside `MQError`; logged as of unknown outcome.

        Cancellation:
            The change may be done or not; logged so.
        """
        form = await self.form(request)
        done = await self._carried_out(request, form, what(form), act)
        where = back(form)
        return RedirectResponse(
            f"{where}{'&' if '?' in where else '?'}{urlencode({'done': done.number})}", 303
        )

    async def _carried_out(self, request: Request, form: Form, what: str, act: Act) -> Change:
        account = self.sessions.account(self.session_of(request))
        host = request.client.host if request.client is not None else "an unknown address"
        who = f"{account.access_key if account else 'no account'} from {host}"
        is_done, remark = False, f"no answer within {CHANGE_S:g} s: it may be done or not"
        try:
            with trio.move_on_after(CHANGE_S):
                try:
                    remark = await self._act(account, form, act)
                    is_done = True
                except MQError as error:
                    remark = sentence(error)
        except BaseException as error:
            # Also where the server ends the request: what was asked of brokers by then may stand.
            remark = f"the console failed ({type(error).__name__}): it may be done or not"
            self.changes.record(
                self.now_ms, who, texts.plain(what), is_done=False, remark=texts.plain(remark)
            )
            raise
        return self.changes.record(
            self.now_ms, who, texts.plain(what), is_done=is_done, remark=texts.plain(remark)
        )

    async def _act(self, account: Credentials | None, form: Form, act: Act) -> str:
        if not self.settings.allow_changes:
            raise RefusedError("this console only shows: start it with --allow-changes")
        if account is not None:
            async with self.signed(account) as client:
                return await act(Admin(client), form)
        is_on = await self.access_control()
        if is_on is None:
            raise RefusedError("no broker shows whether access control is on; nothing was done")
        if is_on:
            raise RefusedError("access control is on: sign in first; nothing was done")
        return await act(self.admin, form)

    def signed(self, credentials: Credentials) -> ClientInstance:
        """Return a client of the same cluster that signs as another account, not yet open."""
        return self.open_client(
            replace(self.client.config, credentials=credentials, instance_name="")
        )

    async def access_control(self) -> bool | None:
        """Return whether brokers check accounts; None: none of them can be asked."""
        look = await self.newest_look()
        found: bool | None = None
        for members in look.groups.values():
            for address, said in members.items():
                if address in look.refused:
                    return True
                if said is None:
                    continue
                try:
                    settings = await self.admin.broker_settings(address)
                except MQError as error:
                    if is_access_refusal(error):
                        return True
                    continue
                if settings.get("aclEnable") == "true":
                    return True
                found = False
                break
        return found


def templates() -> jinja2.Environment:
    """Return the pages' templates: everything that is put into them is escaped."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("dledger.console"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "number": texts.number_text,
        "bytes": texts.bytes_text,
        "duration": texts.duration_text,
        "time": texts.time_text,
        "plain": texts.plain,
    }
    return found
