"""What keeps a console from being used by others: sessions, form tokens, host names, headers.

A page of another site that is open in the same browser can make the browser send requests here. It
cannot read an answer, and not send a token that it would have to read first. A name that another
site points at this machine is refused by its host name. What pages may load and run is this
console's own files, and no script or style that stands in a page.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.seams import Clock, Rng

SESSION_COOKIE: Final = "dledger_console"
SESSION_MS: Final = 8 * 3_600_000
"""A working day; then one signs in again."""
SESSIONS_MAX: Final = 256
"""Accounts that are signed in at once; the oldest is signed out for another one."""
SESSION_RANDOM_BYTES: Final = 32
TOKEN_FIELD: Final = "token"
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

REPORT_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
)
"""Of the report of a run, a file of another program: nothing in it runs or sends anything."""

LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class Account:
    """An account that is signed in.

    Attributes:
        credentials: What its requests are signed with.
        until_ms: When it is signed out.
    """

    credentials: Credentials
    until_ms: int


class Sessions:
    """Browsers by the cookie they got, and which account signed in there. In memory only."""

    def __init__(self, clock: Clock, rng: Rng) -> None:
        """Make a key for form tokens: those of an earlier process are void."""
        self._clock = clock
        self._rng = rng
        self._key = rng.randbytes(SESSION_RANDOM_BYTES)
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def new_id(self) -> str:
        """Return a new session; it cannot be guessed."""
        return self._rng.randbytes(SESSION_RANDOM_BYTES).hex()

    def token(self, session: str) -> str:
        """Return what the forms of a session carry."""
        return hmac.new(self._key, session.encode(), hashlib.sha256).hexdigest()

    def owns(self, session: str, token: str) -> bool:
        """Return whether a form with *token* came from a page of this session."""
        return bool(session) and hmac.compare_digest(
            self.token(session).encode(), token.encode("utf-8", "surrogatepass")
        )

    def sign_in(self, credentials: Credentials) -> str:
        """Return the new session of an account: what was known of the browser before is void."""
        session = self.new_id()
        self._accounts[session] = Account(credentials, self._clock.wall_ms() + SESSION_MS)
        while len(self._accounts) > SESSIONS_MAX:
            self._accounts.popitem(last=False)
        return session

    def sign_out(self, session: str) -> None:
        """Forget the account of a session."""
        self._accounts.pop(session, None)

    def account(self, session: str) -> Credentials | None:
        """Return the account that is signed in; None: there is none, or its time is over."""
        found = self._accounts.get(session)
        if found is None:
            return None
        if self._clock.wall_ms() >= found.until_ms:
            del self._accounts[session]
            return None
        return found.credentials


def foreign_origin(headers: Mapping[str, str]) -> str | None:
    """Return the origin of a request that another site's page sent; None: it is our own page's.

    Browsers of today state both; one that states nothing has the form's token alone.
    """
    site = headers.get("sec-fetch-site")
    if site not in (None, "same-origin", "none"):
        return headers.get("origin", site)
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return origin
    return None
