"""The cluster: groups, members and their lag as it moves, elections, disks, NameServers."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dledger.client.admin.admin import Admin
from dledger.console.cluster_look import group_views
from dledger.console.cluster_watch import LANE_HEIGHT, LANE_WIDTH, LOOK_EVERY_S
from dledger.console.console import Console, Form, RefusedError


async def home(_request: Request) -> Response:
    """Lead to the cluster."""
    return RedirectResponse("/cluster")


async def cluster(request: Request) -> Response:
    """Show the cluster as it was seen last."""
    console: Console = request.app.state.console
    values = await _values(console)
    return console.page(request, "cluster.html.j2", "Cluster", refresh_s=5, **values)


async def live(request: Request) -> Response:
    """Return the part of the page that moves."""
    console: Console = request.app.state.console
    session = console.session_of(request)
    return console.fragment(
        "cluster_live.html.j2",
        **await _values(console),
        allow_changes=console.settings.allow_changes,
        token=console.sessions.token(session),
    )


async def _values(console: Console) -> dict[str, Any]:
    look = await console.newest_look()
    views = group_views(look)
    silent = [address for address, known in look.name_servers.items() if known is None]
    problems = []
    if look.name_servers and len(silent) == len(look.name_servers):
        problems.append(
            "no NameServer answers: what is shown of members comes from themselves, and a group"
            " that was never seen before is missing"
        )
    elif silent:
        problems.append(f"NameServer {', '.join(silent)} does not answer")
    for view in views:
        quiet = [row for row in view.members if row.role == "no answer"]
        refused = sum(row.role == "refused" for row in view.members)
        if refused:
            problems.append(
                f"{refused} of {len(view.members)} members of {view.name} refuse the account of"
                " this console: their terms, indexes and disks are not known"
            )
        elif view.leader is None:
            problems.append(
                f"{view.name} has no leader now: nothing can be stored there, lag is not known"
            )
        if quiet:
            problems.append(
                f"{len(quiet)} of {len(view.members)} members of {view.name} do not answer:"
                " their terms, indexes and disks are not known"
            )
    if not views:
        problems.append("no broker group is known")
    return {
        "groups": views,
        "look": look,
        "lanes": console.watch.lanes(),
        "lane_width": LANE_WIDTH,
        "lane_height": LANE_HEIGHT,
        "events": list(console.watch.events)[:50],
        "problems": problems,
        "stale": console.now_ms - look.at_ms > 5_000 * LOOK_EVERY_S,
    }


async def transfer(request: Request) -> Response:
    """Move the leadership of a group."""

    async def act(admin: Admin, form: Form) -> str:
        if not form.get("group"):
            raise RefusedError("no group is named")
        await admin.change_members(form["group"], "transfer", form.get("member", ""))
        return "done"

    console: Console = request.app.state.console
    return await console.change(
        request,
        lambda form: f"move leadership of {form.get('group')} to {form.get('member')}",
        lambda form: "/cluster",
        act,
    )
