"""What keeps a console from being used by others: sessions, origins, host names, headers.

A page of another site that is open in the same browser can make the browser send requests here. It
cannot hide where they come from: a form is taken only if the browser states that a page of this
console sent it. A name that another site points at this machine is refused by its host name. What
pages may load and run is this console's own files, and no script or style that stands in a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.seams import Clock, Rng

SESSION_COOKIE: Final = "dledger_console"
SESSION_MS: Final = 8 * 3_600_000
"""A working day; then one signs in again."""
SESSIONS_MAX: Final = 256
"""Accounts that are signed in at once; the oldest is signed out for another one."""
SESSION_RANDOM_BYTES: Final = 32
FORM_BYTES_MAX: Final = 64 << 10
"""Of a form that is sent here; the largest has a topic's fields."""

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self';"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer."""

LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")


class Sessions:
    """Browsers by the cookie they got, and which account signed in there. In memory only."""

    def __init__(self, clock: Clock, rng: Rng) -> None:
        self._clock = clock
        self._rng = rng
        self._accounts: OrderedDict[str, tuple[Credentials, int]] = OrderedDict()

    def new_id(self) -> str:
        """Return a new session; it cannot be guessed."""
        return self._rng.randbytes(SESSION_RANDOM_BYTES).hex()

    def sign_in(self, credentials: Credentials) -> str:
        """Return the new session of an account: what was known of the browser before is void."""
        session = self.new_id()
        self._accounts[session] = credentials, self._clock.wall_ms() + SESSION_MS
        while len(self._accounts) > SESSIONS_MAX:
            self._accounts.popitem(last=False)
        return session

    def sign_out(self, session: str) -> None:
        """Forget the account of a session."""
        self._accounts.pop(session, None)

    def account(self, session: str) -> Credentials | None:
        """Return the account that is signed in; None: there is none, or its time is over."""
        credentials, until_ms = self._accounts.get(session, (None, 0))
        if self._clock.wall_ms() < until_ms:
            return credentials
        self.sign_out(session)
        return None


def foreign_origin(headers: Mapping[str, str]) -> str | None:
    """Return the origin of a form that no page of ours sent; None: one did, the browser states."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin") or (site is None and origin is None):
        return origin or site or "an unknown site"
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return origin
    return None
