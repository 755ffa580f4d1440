"""Signing in with an account of the cluster."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientInstance
from dledger.commitlog.errors import MQError
from dledger.console.console import Console, RefusedError
from dledger.console.guard import SESSION_MS
from dledger.console.known import is_access_refusal, is_admin_refusal, sentence
from dledger.remoting.protocol.signature import Credentials

REFUSED_PAUSE_S: Final = 1.0
"""Before a refusal of a sign-in is answered: secrets are not tried out quickly."""
OTHER_SECRET_BYTES: Final = 16
"""Of a secret that no account has: a broker that takes it checks none."""


async def accounts(request: Request) -> Response:
    """Show whether access control is on, and the form to sign in."""
    console: Console = request.app.state.console
    return console.page(
        request,
        "accounts.html.j2",
        "Accounts",
        access_control=await console.access_control(),
        hours=SESSION_MS // 3_600_000,
    )


async def sign_in(request: Request) -> Response:
    """Sign in, if a broker takes the account."""
    console: Console = request.app.state.console
    form = await console.form(request)
    access_key, secret_key = form.get("access_key", "").strip(), form.get("secret_key", "")
    session, remark, is_done = console.session_of(request), "signed in", False
    try:
        if not access_key or not secret_key:
            raise RefusedError("name and secret are needed")
        credentials = Credentials(access_key, secret_key)
        await _proved(console, credentials)
        console.sessions.sign_out(session)
        session, is_done = console.sessions.sign_in(credentials), True
    except MQError as error:
        await console.client.clock.sleep(REFUSED_PAUSE_S)
        remark = sentence(error)
    console.record(request, session, "sign in", remark, is_done=is_done, who=access_key)
    response = RedirectResponse("/accounts", 303)
    console.keep_session(response, session)
    return response


async def _proved(console: Console, credentials: Credentials) -> None:
    """Have a broker check an account.

    Raises RefusedError: access control is off, no broker answers, none of them checks signatures of
    this console, or one refuses the account.
    """
    if await console.access_control() is False:
        raise RefusedError("access control is off: there are no accounts")
    look = await console.newest_look()
    any_secret = console.client.rng.randbytes(OTHER_SECRET_BYTES).hex()
    unchecked = False
    async with (
        console.signed(credentials) as client,
        console.signed(Credentials(credentials.access_key, any_secret)) as other,
    ):
        for address in look.figures or [a for m in look.groups.values() for a in m]:
            is_taken = await _is_taken(client, address)
            if is_taken is False:
                raise RefusedError("brokers do not take this name with this secret")
            if not is_taken:
                continue
            is_other_taken = await _is_taken(other, address)
            if is_other_taken is False:
                return
            unchecked = unchecked or bool(is_other_taken)
    if unchecked:
        raise RefusedError(
            "brokers take this name with any secret from this console's address, which is on"
            " their white list: the account cannot be checked"
        )
    raise RefusedError("no broker answers, so the account cannot be checked")


async def _is_taken(client: ClientInstance, address: str) -> bool | None:
    """Return whether a broker takes the account of *client*; None: it does not answer."""
    try:
        await Admin(client).runtime_info(address)
    except MQError as error:
        if is_admin_refusal(error):
            return True
        return False if is_access_refusal(error) else None
    return True


async def sign_out(request: Request) -> Response:
    """Sign out."""
    console: Console = request.app.state.console
    await console.form(request)
    console.sessions.sign_out(console.session_of(request))
    response = RedirectResponse("/accounts", 303)
    console.keep_session(response, console.sessions.new_id())
    return response
