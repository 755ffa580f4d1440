"""The cluster: groups, members and their lag as it moves, disks, NameServers."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dledger.client.admin.admin import Admin
from dledger.console.console import Console, Form, RefusedError
from dledger.console.look import ClusterLook, group_views


async def cluster(request: Request) -> Response:
    """Show the cluster."""
    console: Console = request.app.state.console
    values = shown(await console.newest_look())
    return console.page(request, "cluster.html.j2", "Cluster", refresh_s=5, **values)


async def live(request: Request) -> Response:
    """Return the part of the page that moves."""
    console: Console = request.app.state.console
    values = shown(await console.newest_look())
    changes = console.settings.allow_changes
    return console.fragment("cluster_live.html.j2", allow_changes=changes, **values)


def shown(look: ClusterLook) -> dict[str, Any]:
    """Return what the template shows of a look. Pure."""
    views, problems = group_views(look), []
    silent = [address for address, known in look.name_servers.items() if known is None]
    if look.name_servers and len(silent) == len(look.name_servers):
        problems.append(
            "no NameServer answers: what is shown of members comes from themselves, and a group"
            " that was never seen before is missing"
        )
    elif silent:
        problems.append(f"NameServer {', '.join(silent)} does not answer")
    for view in views:
        roles = [row.role for row in view.members]
        if "refused" in roles:
            problems.append(
                f"{roles.count('refused')} of {len(roles)} members of {view.name} refuse the"
                " account of this console: their terms, indexes and disks are not known"
            )
        elif view.leader is None:
            problems.append(
                f"{view.name} has no leader now: nothing can be stored there, lag is not known"
            )
        if "no answer" in roles:
            problems.append(
                f"{roles.count('no answer')} of {len(roles)} members of {view.name} do not answer:"
                " their terms, indexes and disks are not known"
            )
    if not views:
        problems.append("no broker group is known")
    return {"groups": views, "look": look, "problems": problems}


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
