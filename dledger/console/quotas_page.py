"""Quotas: a list with what brokers did because of them, one quota, and changes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypedDict
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin
from dledger.console import texts
from dledger.console.console import Console, Form, RefusedError
from dledger.console.known import asking
from dledger.console.paging import matching, paged
from dledger.remoting.protocol.quota_bodies import QuotaInfo

KINDS: Final = {"account": "account", "client": "client without an account"}


class Limits(TypedDict):
    """What `Admin.set_quota` sets; None: no limit."""

    sent_messages_per_s: int | None
    sent_bytes_per_s: int | None
    received_messages_per_s: int | None
    received_bytes_per_s: int | None
    connections: int | None


LIMIT_NAMES: Final[Mapping[str, str]] = {
    "sent_messages_per_s": "Messages sent per second",
    "sent_bytes_per_s": "Bytes sent per second",
    "received_messages_per_s": "Messages received per second",
    "received_bytes_per_s": "Bytes received per second",
    "connections": "Connections",
}
"""Fields of a form, in order, as people read them."""


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """One quota in one broker group, and what the leader did because of it."""

    broker: str
    info: QuotaInfo

    @property
    def subject(self) -> str:
        """Whose quota it is."""
        return subject_text(self.info.kind, self.info.name)

    @property
    def sends(self) -> str:
        """What may be sent."""
        return rate_text(self.info.sent_messages_per_s, self.info.sent_bytes_per_s)

    @property
    def receives(self) -> str:
        """What may be received."""
        return rate_text(self.info.received_messages_per_s, self.info.received_bytes_per_s)

    @property
    def query(self) -> str:
        """Query of the address of its page."""
        return urlencode({"kind": self.info.kind, "name": self.info.name})


def subject_text(kind: str, name: str) -> str:
    """Return whose quota it is, for a person. Pure."""
    return f"{kind} {name}" if name else f"each {kind} without a quota of its own"


def rate_text(messages: int | None, size_bytes: int | None) -> str:
    """Return limits of messages and bytes a second, for a person. Pure."""
    parts = []
    if messages is not None:
        parts.append(f"{texts.number_text(messages)} messages/s")
    if size_bytes is not None:
        parts.append(f"{texts.bytes_text(size_bytes)}/s")
    return ", ".join(parts) or "no limit"


def quota_rows(groups: Mapping[str, Iterable[QuotaInfo]], query: str) -> list[QuotaRow]:
    """Return the quotas of some broker groups whose subjects match, by kind and name. Pure."""
    found = [QuotaRow(broker, info) for broker, infos in groups.items() for info in infos]
    subjects = set(matching([row.subject for row in found], query))
    return sorted(
        (row for row in found if row.subject in subjects),
        key=lambda row: (row.info.kind, row.info.name, row.broker),
    )


async def quotas(request: Request) -> Response:
    """Show the quotas of all broker groups, page by page."""
    console: Console = request.app.state.console
    query = request.query_params.get("q", "")
    async with asking() as ask:
        found = ask(console.admin.quotas, "quotas", dict[str, list[QuotaInfo]]())
    page = paged(quota_rows(found.value, query), request.query_params.get("page"), {"q": query})
    return console.page(
        request,
        "quotas.html.j2",
        "Quotas",
        problems=ask.problems,
        rows=page.rows,
        listing=page,
        query=query,
        is_known=not found.problem,
        kinds=KINDS,
        limits=LIMIT_NAMES,
    )


async def quota(request: Request) -> Response:
    """Show one quota in each broker group that has it."""
    console: Console = request.app.state.console
    kind, name = request.query_params.get("kind", ""), request.query_params.get("name", "")
    async with asking() as ask:
        found = ask(console.admin.quotas, "quotas", dict[str, list[QuotaInfo]]())
    rows = [
        row for row in quota_rows(found.value, "") if (row.info.kind, row.info.name) == (kind, name)
    ]
    is_missing = not rows and not found.problem
    return console.page(
        request,
        "quota.html.j2",
        f"Quota of {subject_text(kind, name)}",
        status=404 if is_missing else 200,
        problems=ask.problems,
        kind=kind,
        name=name,
        rows=rows,
        is_missing=is_missing,
        limits=LIMIT_NAMES,
        current=limits_of(rows[0].info) if rows else None,
        differ=len({tuple(limits_of(row.info).values()) for row in rows}) > 1,
    )


def limits_of(info: QuotaInfo) -> Limits:
    """Return the limits of a quota by the names of their fields. Pure."""
    return {
        "sent_messages_per_s": info.sent_messages_per_s,
        "sent_bytes_per_s": info.sent_bytes_per_s,
        "received_messages_per_s": info.received_messages_per_s,
        "received_bytes_per_s": info.received_bytes_per_s,
        "connections": info.connections,
    }


# ----------------------------------------------------------------------------------- changes


def _named(form: Form) -> tuple[str, str]:
    """Return kind and name of the quota that a form is about; an empty name is the default."""
    kind = form.get("kind", "")
    if kind not in KINDS:
        raise RefusedError(f"a quota is one of {' or '.join(KINDS)}; nothing was changed")
    return kind, form.get("name", "").strip()


def limits_in(form: Form) -> Limits:
    """Return the limits that a form has; an empty field is none. Pure.

    Raises:
        RefusedError: One is no whole number from 1 on, or none is given and the box for that is not
            ticked; nothing was changed.
    """
    info = QuotaInfo()
    for field, title in LIMIT_NAMES.items():
        text = form.get(field, "").strip()
        if not text:
            continue
        if not (number := texts.whole(text)):
            raise RefusedError(f"{title}: a whole number from 1 on, or nothing for no limit")
        setattr(info, field, number)
    found = limits_of(info)
    if not any(found.values()) and form.get("unlimited") != "1":
        raise RefusedError("give a limit, or tick that there is none; nothing was changed")
    return found


def _limits_text(form: Form) -> str:
    given = [
        f"{title.lower()} {form[field]}" for field, title in LIMIT_NAMES.items() if form.get(field)
    ]
    return ", ".join(given) or "no limit"


def _subject(form: Form) -> str:
    return subject_text(form.get("kind", ""), form.get("name", "").strip())


def _page_of(form: Form) -> str:
    address = {"kind": form.get("kind", ""), "name": form.get("name", "").strip()}
    return f"/quota?{urlencode(address)}"


async def set_quota(request: Request) -> Response:
    """Set a quota as a whole, in every broker group."""

    async def act(admin: Admin, form: Form) -> str:
        kind, name = _named(form)
        limits = limits_in(form)
        if form.get("is_new") == "1":
            there = (info for infos in (await admin.quotas()).values() for info in infos)
            if any((info.kind, info.name) == (kind, name) for info in there):
                raise RefusedError("this quota exists already; nothing was changed")
        done = await admin.set_quota(
            account=name if kind == "account" else None,
            client=name if kind == "client" else None,
            **limits,
        )
        return f"it is in {', '.join(done)}"

    console: Console = request.app.state.console
    return await console.change(
        request,
        lambda form: f"set the quota of {_subject(form)}: {_limits_text(form)}",
        _page_of,
        act,
    )


async def remove_quota(request: Request) -> Response:
    """Remove a quota from every broker group that has it."""

    async def act(admin: Admin, form: Form) -> str:
        kind, name = _named(form)
        there = [
            broker
            for broker, infos in (await admin.quotas()).items()
            if any((info.kind, info.name) == (kind, name) for info in infos)
        ]
        if not there:
            raise RefusedError("there is no such quota; nothing was changed")
        done = await admin.delete_quota(
            account=name if kind == "account" else None,
            client=name if kind == "client" else None,
            broker_names=tuple(there),
        )
        return f"removed from {', '.join(done)}"

    console: Console = request.app.state.console
    return await console.change(
        request,
        lambda form: f"remove the quota of {_subject(form)}",
        lambda form: "/quotas",
        act,
    )
