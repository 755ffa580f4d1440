"""The hook of the Helm chart, run as a pod runs it, against a server that speaks as Kubernetes'."""

import json
import os
import ssl
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from tests.harness.deployed_files import DEPLOY

HOOK = DEPLOY / "helm" / "dledger" / "files" / "pod_role.py"
MEMBERS = "app.kubernetes.io/instance=mq,app.kubernetes.io/component=broker"
PODS = "/api/v1/namespaces/queues/pods"


@dataclass
class Api:
    """Pods and their role, as the cluster knows them."""

    folder: Path
    roles: dict[str, str] = field(default_factory=dict)
    port: int = 0

    def answer(self, request: BaseHTTPRequestHandler) -> object:
        assert request.headers["Authorization"] == "Bearer secret"
        path, _, query = request.path.partition("?")
        if request.command == "GET":
            assert path == PODS
            assert urllib.parse.unquote(query) == f"labelSelector={MEMBERS},dledger/role=leader"
            leaders = [name for name, role in self.roles.items() if role == "leader"]
            return {"items": [{"metadata": {"name": name}} for name in leaders]}
        assert request.headers["Content-Type"] == "application/merge-patch+json"
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        (name,) = Path(path).relative_to(PODS).parts
        self.roles[name] = body["metadata"]["labels"]["dledger/role"]
        return body

    def run(self, event: str, pod: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "ACCOUNT": str(self.folder),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.port),
            "MEMBERS": MEMBERS,
            "HOSTNAME": pod,
        }
        command = [sys.executable, str(HOOK), event, "mq-leader:10911"]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )


@contextmanager
def serving(api: Api) -> Iterator[None]:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(api.folder / "ca.crt")
    (api.folder / "token").write_text("secret")
    (api.folder / "namespace").write_text("queues")

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = json.dumps(api.answer(self)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PATCH = answer  # noqa: N815  # names that the library calls

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.port = server.server_address[1]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_pod_that_leads_is_the_only_one_with_the_label(tmp_path: Path) -> None:
    api = Api(tmp_path, {"mq-broker-0": "leader", "mq-broker-1": "follower"})
    with serving(api):
        assert api.run("gain", "mq-broker-1").returncode == 0
        assert api.roles == {"mq-broker-0": "follower", "mq-broker-1": "leader"}
        assert api.run("loss", "mq-broker-1").returncode == 0
        assert api.roles == {"mq-broker-0": "follower", "mq-broker-1": "follower"}


@pytest.mark.parametrize(("event", "is_success"), [("gain", False), ("loss", True)])
def test_label_that_cannot_be_given_back_ends_no_member(
    tmp_path: Path, event: str, is_success: bool
) -> None:
    """A gain is tried again; the label of a member that lost is taken by the next leader."""
    api = Api(tmp_path)
    with serving(api):
        pass
    done = api.run(event, "mq-broker-0")
    assert (done.returncode == 0) == is_success
    assert "refused" in done.stderr
