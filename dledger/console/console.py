"""What all pages share: the client of the cluster, templates, sessions, and changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import jinja2
import structlog
import trio
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.commitlog.errors import MQError
from dledger.console import texts
from dledger.console.guard import (
    FORM_BYTES_MAX,
    SESSION_COOKIE,
    SESSION_MS,
    SESSIONS_MAX,
    Sessions,
    foreign_origin,
)
from dledger.console.known import is_access_refusal, sentence
from dledger.console.look import ClusterLook, look_at
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.protocol.topic_names import TRACE_TOPIC

CHANGE_S: Final = 30.0
"""A change may wait for a new leader and for its commit."""
LOOK_AGE_MS: Final = 1_000
"""A page shows a look that is no older."""

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
)
"""Address and name of every page in the navigation."""

logger = structlog.get_logger(__name__)


class RefusedError(MQError):
    """A change that this console does not carry out; nothing was done."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Note(NamedTuple):
    """What came of a change: shown once, on the next page of its browser.

    *is_done*: it was carried out; otherwise it was refused, or its outcome is not known.
    """

    what: str
    is_done: bool
    remark: str


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """How a console was started.

    Attributes:
        allow_changes: Forms are there, and what they send is carried out.
        is_secure: Browsers reach it by https: cookies say so.
    """

    allow_changes: bool = False
    is_secure: bool = False
    trace_topic: str = TRACE_TOPIC


@dataclass(slots=True)
class Console:
    """The parts of one console.

    Attributes:
        client: Open while the console serves.
        open_client: Makes a client with other credentials, not yet open.
        notes: What came of the newest change of each session that has not been shown.
    """

    client: ClientInstance
    open_client: Callable[[ClientConfig], ClientInstance]
    settings: ConsoleSettings = field(default_factory=ConsoleSettings)
    notes: OrderedDict[str, Note] = field(default_factory=OrderedDict)
    sessions: Sessions = field(init=False)
    _look: ClusterLook | None = None
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
        self._look = await look_at(self.admin, self._look, self.now_ms)
        return self._look

    async def newest_look(self) -> ClusterLook:
        """Return a look at the cluster that is not older than `LOOK_AGE_MS`."""
        if self._look is None or self.now_ms - self._look.at_ms > LOOK_AGE_MS:
            return await self.look()
        return self._look

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
        """Return a page."""
        session = self.session_of(request)
        account = self.sessions.account(session)
        body = self._templates.get_template(template).render(
            title=title,
            pages=PAGES,
            path="/" + request.url.path.strip("/").partition("/")[0],
            problems=problems or [],
            account=None if account is None else account.access_key,
            allow_changes=self.settings.allow_changes,
            done=self.notes.pop(session, None),
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
        return HTMLResponse(self._templates.get_template(template).render(values))

    # ------------------------------------------------------------------------------- changes

    async def form(self, request: Request) -> Form:
        """Return the fields of a form that one of our own pages sent.

        Raises RefusedError: it is too large, or another site's page sent it.
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
        return dict(parse_qsl(bytes(body).decode("utf-8", "replace"), keep_blank_values=True))

    def record(
        self, request: Request, session: str, what: str, remark: str, *, is_done: bool, who: str
    ) -> None:
        """Log a change, and show it on the next page of *session*."""
        host = request.client.host if request.client is not None else "an unknown address"
        note = Note(texts.plain(what), is_done, texts.plain(remark))
        self.notes[session] = note
        while len(self.notes) > SESSIONS_MAX:
            self.notes.popitem(last=False)
        log = logger.info if is_done else logger.warning
        log("console_change", who=f"{who or 'no account'} from {host}", **note._asdict())

    async def change(
        self, request: Request, what: Callable[[Form], str], back: Callable[[Form], str], act: Act
    ) -> Response:
        """Carry out a change that a form asks for, log it, and lead to a page that shows it.

        Args:
            what: Names the change.
            back: Address of the page that shows it.
            act: Does it; returns what came of it.
        Raises:
            RefusedError: The form is not from a page of ours; nothing was done or logged.
            Exception: What *act* raised beside `MQError`; logged as of unknown outcome.

        Cancellation:
            The change may be done or not; logged so.
        """
        form = await self.form(request)
        session = self.session_of(request)
        account = self.sessions.account(session)
        is_done, remark = False, "the console failed: it may be done or not"
        try:
            with trio.move_on_after(CHANGE_S) as scope:
                try:
                    remark = await self._act(account, form, act)
                    is_done = True
                except MQError as error:
                    remark = sentence(error)
            if scope.cancelled_caught:
                remark = f"no answer within {CHANGE_S:g} s: it may be done or not"
        finally:
            # Also where the server ends the request: what was asked of brokers by then may stand.
            who = "" if account is None else account.access_key
            self.record(request, session, what(form), remark, is_done=is_done, who=who)
        response = RedirectResponse(back(form), 303)
        self.keep_session(response, session)
        return response

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


def change(
    what: Callable[[Form], str], back: Callable[[Form], str]
) -> Callable[[Act], Callable[[Request], Awaitable[Response]]]:
    """Make an address of a function that changes the cluster; see `Console.change`."""

    def decorated(act: Act) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            console: Console = request.app.state.console
            return await console.change(request, what, back, act)

        return endpoint

    return decorated


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
