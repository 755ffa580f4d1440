"""The `broker.leader_hook` of a pod: labels the member that leads, and no other, for a Service.

Arguments: `gain` or `loss`, then the address, which the Service has already.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path(os.environ.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
ROLE = "dledger/role"
TIMEOUT_S = 1.0
"""For one request; `broker.leader_hook_timeout_ms` is for all."""


def ask(path: str, body: object = None) -> Any:
    """Return what the cluster answers: a read, or with a *body* a change; an error is raised."""
    namespace = (ACCOUNT / "namespace").read_text()
    server = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    asked = urllib.request.Request(
        f"https://{server}/api/v1/namespaces/{namespace}/pods{path}",
        None if body is None else json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/merge-patch+json",
        },
        method="GET" if body is None else "PATCH",
    )
    context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S, context=context) as answer:
        return json.load(answer)


def label(pod: str, role: str) -> None:
    """Give a pod its role."""
    ask(f"/{pod}", {"metadata": {"labels": {ROLE: role}}})


def gain(members: str, own: str) -> None:
    """Take the label from the pods that have it, which may be dead, and give it to this one."""
    wanted = urllib.parse.quote(f"{members},{ROLE}=leader")
    for item in ask(f"?labelSelector={wanted}")["items"]:
        if item["metadata"]["name"] != own:
            label(item["metadata"]["name"], "follower")
    label(own, "leader")


def lose(own: str) -> None:
    """Give this pod's label back; where that fails the next leader takes it."""
    try:
        label(own, "follower")
    except OSError as error:
        sys.stderr.write(f"the label of {own} stays: {error}\n")


if __name__ == "__main__":
    if sys.argv[1] == "gain":
        gain(os.environ["MEMBERS"], os.environ["HOSTNAME"])
    else:
        lose(os.environ["HOSTNAME"])
