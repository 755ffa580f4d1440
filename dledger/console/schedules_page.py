"""Repeated schedules: a list, one schedule with its message, and changes of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin
from dledger.client.core.message import Message
from dledger.console import texts
from dledger.console.console import Console, Form, RefusedError
from dledger.console.known import asking
from dledger.console.paging import matching, paged
from dledger.remoting.protocol.schedule_bodies import ScheduleInfo
from dledger.schedule_texts import instant_text, state_text


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One schedule, and the broker group that has it."""

    broker: str
    info: ScheduleInfo

    @property
    def state(self) -> str:
        """Whether it is active, paused, held (with the reason) or ended."""
        return state_text(self.info)

    @property
    def mark(self) -> str:
        """The class of its state in the style sheet."""
        return {"active": "good", "ended": "", "paused": "warn"}.get(self.state, "bad")

    @property
    def next_local(self) -> str:
        """Its next instant in its own time zone; empty where there is none."""
        return instant_text(self.info.next_ms, self.info.time_zone) or ""


def schedule_rows(groups: Mapping[str, list[ScheduleInfo]], query: str) -> list[ScheduleRow]:
    """Return the schedules of some broker groups whose names match, by name. Pure."""
    found = [ScheduleRow(broker, info) for broker, infos in groups.items() for info in infos]
    names = set(matching([row.info.name for row in found], query))
    return sorted(
        (row for row in found if row.info.name in names),
        key=lambda row: (row.info.name, row.broker),
    )


async def schedules(request: Request) -> Response:
    """Show the schedules, page by page."""
    console: Console = request.app.state.console
    query = request.query_params.get("q", "")
    async with asking() as ask:
        found = ask(console.admin.schedules, "schedules", dict[str, list[ScheduleInfo]]())
    rows = schedule_rows(found.value, query)
    page = paged(rows, request.query_params.get("page"), {"q": query})
    return console.page(
        request,
        "schedules.html.j2",
        "Schedules",
        problems=ask.problems,
        rows=page.rows,
        listing=page,
        query=query,
        is_known=not found.problem,
    )


async def schedule(request: Request) -> Response:
    """Show one schedule: its times, its message, and what was sent."""
    console: Console = request.app.state.console
    name = request.query_params.get("name", "")
    async with asking() as ask:
        found = ask(partial(console.admin.schedule, name), "the schedule", None)
    row = None if found.value is None else ScheduleRow(*found.value)
    is_missing = row is None and not found.problem
    return console.page(
        request,
        "schedule.html.j2",
        f"Schedule {name}",
        status=404 if is_missing else 200,
        problems=ask.problems,
        name=name,
        row=row,
        is_missing=is_missing,
        body=None if row is None else texts.body_text(row.info.body),
    )


# ----------------------------------------------------------------------------------- changes


def _page_of(form: Form) -> str:
    return f"/schedule?{urlencode({'name': form.get('name', '')})}"


def _time_ms(form: Form, field: str) -> int:
    text = form.get(field, "").strip()
    if not text:
        return 0
    if (found := texts.time_ms(text)) is None:
        raise RefusedError(f"{field}: a date and a time, or nothing")
    return found


async def add_schedule(request: Request) -> Response:
    """Add a schedule; one of that name that is there is not replaced."""

    async def act(admin: Admin, form: Form) -> str:
        name, zone = form.get("name", ""), form.get("time_zone", "").strip() or "UTC"
        if await admin.schedule(name) is not None:
            raise RefusedError(f"{name} exists already; nothing was changed")
        message = Message(
            form.get("topic", "").strip(),
            form.get("body", "").encode(),
            tags=form.get("tag", "").strip(),
            keys=form.get("key", "").strip(),
        )
        put = await admin.put_schedule(
            name,
            form.get("expression", ""),
            message,
            time_zone=zone,
            begin_ms=_time_ms(form, "begin"),
            end_ms=_time_ms(form, "end"),
            paused=form.get("paused") == "1",
        )
        if form.get("paused") == "1":
            return f"it is in {put.broker_name}, and paused"
        return f"it is in {put.broker_name}, and due at {instant_text(put.coming_ms[0], zone)}"

    console: Console = request.app.state.console
    return await console.change(
        request,
        lambda form: (
            f"add schedule {form.get('name', '')}: {form.get('expression', '')}"
            f" {form.get('time_zone', '')}, to topic {form.get('topic', '')}"
        ),
        _page_of,
        act,
    )


async def _changed(
    request: Request,
    verb: str,
    outcome: str,
    change: Callable[[Admin, str], Awaitable[str]],
) -> Response:
    """Pause or resume the schedule that a form names."""

    async def act(admin: Admin, form: Form) -> str:
        return f"it {outcome} in {await change(admin, form.get('name', ''))}"

    console: Console = request.app.state.console
    return await console.change(
        request, lambda form: f"{verb} schedule {form.get('name', '')}", _page_of, act
    )


async def pause_schedule(request: Request) -> Response:
    """Pause a schedule."""
    return await _changed(request, "pause", "is paused", Admin.pause_schedule)


async def resume_schedule(request: Request) -> Response:
    """Resume a schedule."""
    return await _changed(request, "resume", "goes on", Admin.resume_schedule)


async def remove_schedule(request: Request) -> Response:
    """Remove a schedule whose name was typed once more."""

    async def act(admin: Admin, form: Form) -> str:
        name = form.get("name", "")
        if form.get("again") != name:
            raise RefusedError("the name that was typed is another one; nothing was removed")
        return f"removed from {await admin.delete_schedule(name)}"

    console: Console = request.app.state.console
    return await console.change(
        request,
        lambda form: f"remove schedule {form.get('name', '')}",
        lambda form: "/schedules",
        act,
    )
