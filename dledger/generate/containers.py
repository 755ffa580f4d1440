"""An image without root, and what runs it: a compose file, and a Helm chart.

Each has NameServers, brokers of one group, a proxy for gRPC clients, and a console; the compose
file has three of the first two.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import yaml

UID: Final = 10001
CLIENT_PORT: Final = 10911
PEER_PORT: Final = 20911
METRICS_PORT: Final = 5557
NAMESRV_PORT: Final = 9876
PROXY_PORT: Final = 8081
CONSOLE_PORT: Final = 8180

_PROBE: Final = (
    "import sys,urllib.request as r;r.urlopen(f'http://127.0.0.1:{sys.argv[1]}/readyz',timeout=3)"
)

CONTAINERFILE: Final = f"""\
# Builds from the source tree: podman build --format docker -t dledger -f DIR/Containerfile .
FROM docker.io/library/python:3.13-slim AS build
COPY . /src
RUN python -m venv /opt/dledger && /opt/dledger/bin/pip install --no-cache-dir '/src[proxy,console]'

FROM docker.io/library/python:3.13-slim
COPY --from=build /opt/dledger /opt/dledger
RUN useradd --uid {UID} --user-group --no-create-home --shell /usr/sbin/nologin dledger \\
    && install -d -o {UID} -g {UID} -m 0700 /var/lib/dledger /var/lib/secret
ENV PATH=/opt/dledger/bin:$PATH HOME=/var/lib/dledger PYTHONUNBUFFERED=1
USER {UID}:{UID}
VOLUME /var/lib/dledger
EXPOSE {CLIENT_PORT} {PEER_PORT} {NAMESRV_PORT} {PROXY_PORT} {CONSOLE_PORT} {METRICS_PORT}
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=6 \\
    CMD ["python", "-c", "{_PROBE}", "{METRICS_PORT}"]
ENTRYPOINT ["dledger"]
CMD ["--help"]
"""


def compose_files(image: str, advertise: str) -> dict[str, str]:
    """Return Containerfile and compose file by name.

    Args:
        image: Its name and tag.
        advertise: Address of this machine that clients outside the containers use, each broker at a
            port of its own; empty: clients are containers of the same network.
    """
    name_servers = [f"namesrv{number}" for number in range(3)]
    brokers = [f"n{number}" for number in range(3)]
    services: dict[str, Any] = {"secret": _secret(image)}
    services |= {name: _name_server(image) for name in name_servers}
    for number, name in enumerate(brokers):
        services[name] = _broker(image, number, name, brokers, name_servers, advertise)
    services["proxy"] = _proxy(image, name_servers, advertise)
    services["console"] = _console(image, name_servers)
    if advertise:
        services[name_servers[0]]["ports"] = [f"{NAMESRV_PORT}:{NAMESRV_PORT}"]
    volumes: dict[str, dict[str, str]] = {"secret": {}, **{f"data-{name}": {} for name in brokers}}
    text = yaml.safe_dump(
        {"name": "dledger", "services": services, "volumes": volumes}, sort_keys=False, width=1000
    )
    return {"Containerfile": CONTAINERFILE, "compose.yaml": str(text)}


def _container(image: str, command: list[str]) -> dict[str, Any]:
    return {
        "image": image,
        "command": command,
        "restart": "unless-stopped",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "stop_grace_period": "60s",
        "tmpfs": ["/tmp"],
    }


def _secret(image: str) -> dict[str, Any]:
    """Return the container that makes the secret of the members once and ends."""
    make = "test -s /var/lib/secret/peers || dledger raft secret /var/lib/secret/peers"
    return {
        **_container(image, ["-c", make]),
        "entrypoint": ["sh"],
        "restart": "no",
        "healthcheck": {"disable": True},
        "volumes": ["secret:/var/lib/secret"],
    }


def _name_server(image: str) -> dict[str, Any]:
    settings = f"""\
printf '[server]\\nlisten_host="0.0.0.0"\\n' > /tmp/n.toml
printf 'metrics_listen_host="0.0.0.0"\\nmetrics_listen_port={METRICS_PORT}\\n' >> /tmp/n.toml
exec dledger namesrv -c /tmp/n.toml"""
    return {**_container(image, ["-c", settings]), "entrypoint": ["sh"]}


def _broker(
    image: str,
    number: int,
    name: str,
    brokers: list[str],
    name_servers: list[str],
    advertise: str,
) -> dict[str, Any]:
    port = CLIENT_PORT + 10 * number if advertise else CLIENT_PORT
    settings = {
        "broker.namesrv_addr": _addresses(name_servers),
        "broker.broker_ip1": advertise or name,
        "raft.group": "broker-a",
        "raft.self_id": name,
        "raft.peers": ";".join(f"{peer}-{peer}:{PEER_PORT}" for peer in brokers),
        "raft.secret_file": "/var/lib/secret/peers",
        "server.listen_host": "0.0.0.0",
        "server.listen_port": str(port),
        "store.path_root_dir": "/var/lib/dledger",
        "metrics.listen_host": "0.0.0.0",
        "metrics.listen_port": str(METRICS_PORT),
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return {
        **_container(image, ["broker", *options]),
        "depends_on": {
            "secret": {"condition": "service_completed_successfully"},
            **_started(name_servers),
        },
        "volumes": [f"data-{name}:/var/lib/dledger", "secret:/var/lib/secret:ro"],
        "ulimits": {"nofile": 65_536},
        **({"ports": [f"{port}:{port}"]} if advertise else {}),
    }


def _proxy(image: str, name_servers: list[str], advertise: str) -> dict[str, Any]:
    listen, metrics = f"0.0.0.0:{PROXY_PORT}", f"0.0.0.0:{METRICS_PORT}"
    options = ["--namesrv", _addresses(name_servers), "--listen", listen]
    options += ["--advertised", f"{advertise or 'proxy'}:{PROXY_PORT}", "--metrics", metrics]
    return {
        **_container(image, ["proxy", *options]),
        "depends_on": _started(name_servers),
        **({"ports": [f"{PROXY_PORT}:{PROXY_PORT}"]} if advertise else {}),
    }


def _console(image: str, name_servers: list[str]) -> dict[str, Any]:
    """Return the console, which only shows; its port is published to this machine alone."""
    options = ["--namesrv", _addresses(name_servers), "--host", "0.0.0.0", "--plain-http"]
    return {
        **_container(image, ["console", *options, "--port", str(CONSOLE_PORT)]),
        "healthcheck": {"test": ["CMD", "python", "-c", _PROBE, str(CONSOLE_PORT)]},
        "depends_on": _started(name_servers),
        "ports": [f"127.0.0.1:{CONSOLE_PORT}:{CONSOLE_PORT}"],
    }


def _addresses(name_servers: list[str]) -> str:
    return ";".join(f"{server}:{NAMESRV_PORT}" for server in name_servers)


def _started(names: list[str]) -> dict[str, dict[str, str]]:
    return {name: {"condition": "service_started"} for name in names}


_CHART_FILES: Final = (
    "Chart.yaml",
    "values.yaml",
    "templates/_helpers.tpl",
    "templates/broker.yaml",
    "templates/namesrv.yaml",
    "templates/secret.yaml",
    "templates/proxy.yaml",
    "templates/console.yaml",
    "templates/NOTES.txt",
)


def helm_files() -> dict[str, str]:
    """Return the chart's files by their paths in it."""
    chart = files("dledger.generate") / "chart"
    return {f"dledger/{name}": (chart / name).read_text(encoding="utf-8") for name in _CHART_FILES}
