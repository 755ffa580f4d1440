"""The addresses of a console, and what holds for every request: host name, headers, errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dledger.console import (
    account_pages,
    dead_letters_page,
    groups_page,
    messages_page,
    state_pages,
    topics_page,
)
from dledger.console.console import Console, RefusedError
from dledger.console.guard import HEADERS, LOOPBACK_HOSTS
from dledger.remoting.metrics import ALIVE_PATH, READY_PATH

STATIC: Final = Path(__file__).parent / "static"


def routes() -> list[Route | Mount]:
    """Return every address; those that change something take POST alone."""

    def post(path: str, endpoint: Any) -> Route:
        return Route(path, endpoint, methods=["POST"])

    return [
        Route("/", _home),
        Route("/cluster", state_pages.cluster),
        Route("/cluster/live", state_pages.live),
        post("/cluster/transfer", state_pages.transfer),
        Route("/topics", topics_page.topics),
        Route("/topic", topics_page.topic),
        post("/topic/create", topics_page.create_topic),
        post("/topic/update", topics_page.update_topic),
        post("/topic/delete", topics_page.delete_topic),
        Route("/groups", groups_page.groups),
        Route("/group", groups_page.group),
        Route("/group/plan", groups_page.plan_reset),
        post("/group/reset", groups_page.reset),
        Route("/messages", messages_page.messages),
        Route("/message", messages_page.message),
        Route("/dead-letters", dead_letters_page.dead_letters),
        Route("/dead-letters/group", dead_letters_page.dead_letter_group),
        post("/dead-letters/resend", dead_letters_page.resend),
        Route("/waiting", state_pages.waiting),
        Route("/clients", state_pages.clients),
        Route("/settings", state_pages.settings),
        Route("/accounts", account_pages.accounts),
        post("/sign-in", account_pages.sign_in),
        post("/sign-out", account_pages.sign_out),
        Route(ALIVE_PATH, _alive),
        Route(READY_PATH, _alive),
        Mount("/static", StaticFiles(directory=STATIC), name="static"),
    ]


class FixedHeaders:
    """Puts `HEADERS` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


async def _home(_request: Request) -> Response:
    return RedirectResponse("/cluster")


async def _alive(_request: Request) -> Response:
    return PlainTextResponse("alive\n")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    console: Console = request.app.state.console
    return console.page(
        request, "message.html.j2", "Not done", status=error.status, text=str(error)
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    console: Console = request.app.state.console
    text = "There is no such page." if error.status_code == 404 else error.detail
    return console.page(request, "message.html.j2", "No page", status=error.status_code, text=text)


async def _failed(_request: Request, _error: Exception) -> Response:
    return PlainTextResponse("The console failed; its log has the reason.", 500)


def make_app(console: Console, hosts: Sequence[str] = ()) -> Starlette:
    """Return the ASGI application of a console.

    Args:
        console: Its client must be open while the application serves.
        hosts: Host names that browsers may use, beside those of this machine itself.
    """
    app = Starlette(
        routes=routes(),
        middleware=[
            Middleware(FixedHeaders),
            Middleware(
                TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_HOSTS, *hosts], www_redirect=False
            ),
        ],
        exception_handlers={RefusedError: _refused, HTTPException: _http_error, Exception: _failed},
    )
    app.state.console = console
    return app
