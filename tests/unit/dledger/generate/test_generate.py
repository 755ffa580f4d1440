"""`dledger generate`: what the files say, and whether the tools they are for take them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dledger.cli.main import main
from dledger.generate.containers import UID, compose_files, helm_files
from dledger.generate.grafana import board
from dledger.generate.prometheus import ALERTS, alert_rules, prometheus_files
from dledger.generate.systemd import systemd_files
from tests.harness.board_queries import board_queries, metrics_of
from tests.harness.shipped_files import ROOT

KINDS = ("grafana", "prometheus", "systemd", "compose", "helm")


def write(files: dict[str, str], to: Path) -> Path:
    """Write files as the command does."""
    for name, text in files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(text)
    return to


def run_if_here(*command: str) -> None:
    """Run a tool, if this machine has it, and see that it is content."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_written_once_and_kept(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["generate", kind, "--to", str(tmp_path / "made")]
    assert main(tokens) == 0
    named = capsys.readouterr().err.split()
    assert all(Path(name).read_text() for name in named)
    assert main(tokens) == 0
    changed = Path(named[0])
    changed.write_text("mine")
    assert main(tokens) == 2
    assert "is there and differs; nothing was written" in capsys.readouterr().err
    assert changed.read_text() == "mine"


def test_one_file_alone_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "grafana"]) == 0
    assert json.loads(capsys.readouterr().out) == board()


# ------------------------------------------------------------------------------ what it asks for


def documented() -> set[str]:
    """The metrics on the page, which another test compares with what daemons show."""
    page = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    return set(re.findall(r"`((?:rocketmq|dledger)_[a-z_]+)`", page)) | {"up"}


def test_board_and_alerts_ask_for_metrics_that_there_are() -> None:
    asked = set().union(*(metrics_of(query) for query in board_queries(board())))
    asked |= set().union(*(metrics_of(alert.expression) for alert in ALERTS))
    assert asked <= documented()
    assert len(asked) > 25


def test_a_metric_that_is_not_there_is_found() -> None:
    assert metrics_of('sum by (le) (rate(dledger_nonsense{a="rocketmq_x"}[5m]))') == {
        "dledger_nonsense"
    }
    assert metrics_of("rocketmq_rpc_latency_bucket / up") == {"rocketmq_rpc_latency", "up"}


def test_every_alert_has_a_section_that_helps() -> None:
    page = (ROOT / "docs" / "operate" / "alerts.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [alert.name for alert in ALERTS]
    for rule in yaml.safe_load(alert_rules())["groups"][0]["rules"]:
        assert rule["annotations"]["runbook"].startswith("docs/operate/alerts.md#")


def test_prometheus_takes_configuration_and_rules(tmp_path: Path) -> None:
    write(prometheus_files(["n0:5557", "n1:5557"], ["ns:5558"], ["p:5557"]), tmp_path)
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]
    }
    assert jobs == {
        "dledger-broker": ["n0:5557", "n1:5557"],
        "dledger-namesrv": ["ns:5558"],
        "dledger-proxy": ["p:5557"],
    }
    run_if_here("promtool", "check", "config", str(tmp_path / "prometheus.yml"))


def test_panels_of_the_board_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


# ------------------------------------------------------------------------------ systemd


def test_units_report_and_have_few_rights(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("dledger-broker", "dledger-namesrv"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    files = systemd_files(str(programs))
    write(files, tmp_path)
    units = [name for name in files if name.endswith(".service")]
    for name in units:
        for line in (
            "Type=notify",
            "NoNewPrivileges=yes",
            "ProtectSystem=strict",
            "WatchdogSec=30",
        ):
            assert f"\n{line}\n" in files[name]
    run_if_here("systemd-analyze", "verify", *(str(tmp_path / name) for name in units))


def test_settings_for_units_are_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(systemd_files("/opt/dledger/bin"), tmp_path)
    assert main(["broker", "-c", str(tmp_path / "broker.toml"), "-p"]) == 0
    assert main(["namesrv", "-c", str(tmp_path / "namesrv.toml"), "-p"]) == 0
    assert "/var/lib/dledger-namesrv/kvConfig.json" in capsys.readouterr().out


# ------------------------------------------------------------------------------ containers


def services(advertise: str = "") -> dict[str, Any]:
    """Return the services of the compose file."""
    found: dict[str, Any] = yaml.safe_load(compose_files("dledger:1", advertise)["compose.yaml"])
    services_: dict[str, Any] = found["services"]
    return services_


def test_containers_have_no_rights_and_no_ports_on_networks() -> None:
    found = services()
    daemons = ["console", "n0", "n1", "n2", "namesrv0", "namesrv1", "namesrv2", "proxy"]
    assert sorted(found) == [*daemons, "secret"]
    for service in found.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    published = {name: service["ports"] for name, service in found.items() if "ports" in service}
    assert published == {"console": ["127.0.0.1:8180:8180"]}
    text = compose_files("dledger:1", "")["Containerfile"]
    assert f"\nUSER {UID}:{UID}\n" in text
    assert "/readyz" in text


def test_options_of_container_brokers_are_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    for name in ("n0", "n1", "n2"):
        assert main([*services()[name]["command"], "-p"]) == 0
        printed = capsys.readouterr().out
        assert re.search(rf"^broker\.broker_ip1 += {name} ", printed, re.MULTILINE)
        assert re.search(r"^raft\.peers += n0-n0:20911;n1-n1:20911;n2-n2:20911 ", printed, re.M)


def test_brokers_for_clients_outside_have_ports_of_their_own() -> None:
    found = services("192.0.2.7")
    assert [found[name]["ports"] for name in ("n0", "n1", "n2")] == [
        ["10911:10911"], ["10921:10921"], ["10931:10931"],
    ]  # fmt: skip
    assert "broker.broker_ip1=192.0.2.7" in found["n1"]["command"]
    assert found["proxy"]["ports"] == ["8081:8081"]
    assert "192.0.2.7:8081" in found["proxy"]["command"]


@pytest.mark.parametrize(("advertise", "host"), [("", "proxy"), ("192.0.2.7", "192.0.2.7")])
def test_options_of_a_container_proxy_are_settings(
    advertise: str,
    host: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    assert main([*services(advertise)["proxy"]["command"], "-p"]) == 0
    printed = re.sub(" +", " ", capsys.readouterr().out)
    for line in (
        "server.listen = 0.0.0.0:8081",
        f"server.advertised = {host}:8081",
        "metrics.listen_host = 0.0.0.0",
        "metrics.listen_port = 5557",
        "proxy.namesrv_addr = namesrv0:9876;namesrv1:9876;namesrv2:9876",
    ):
        assert line in printed, printed


@pytest.mark.parametrize("name", ["namesrv0", "secret"])
def test_scripts_of_containers_are_shell(name: str) -> None:
    (_, script) = services()[name]["command"]
    run_if_here("sh", "-n", "-c", script)


# ------------------------------------------------------------------------------ Helm


def test_chart_names_only_values_and_templates_that_there_are() -> None:
    files = helm_files()
    values = yaml.safe_load(files["dledger/values.yaml"])
    chart = yaml.safe_load(files["dledger/Chart.yaml"])
    assert (chart["apiVersion"], chart["name"]) == ("v2", "dledger")
    text = "".join(body for name, body in files.items() if "/templates/" in name)
    assert text.count("{{") == text.count("}}")
    for path in set(re.findall(r"\.Values\.([\w.]+)", text)):
        found: Any = values
        for part in path.split("."):
            assert part in found, path
            found = found[part]
    defined = set(re.findall(r'define "([\w.]+)"', text))
    assert set(re.findall(r'include "([\w.]+)"', text)) <= defined
    for kind in ("StatefulSet", "Deployment", "PodDisruptionBudget", "Service", "Secret"):
        assert f"\nkind: {kind}\n" in text


def helm_documents(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Return what helm makes of the chart with *settings*; it must be content with both."""
    write(helm_files(), folder)
    options = [*(part for one in settings for part in ("--set", one)), "--kube-version", "1.29.0"]
    run_if_here("helm", "lint", "--strict", str(folder / "dledger"), *options)
    done = subprocess.run(
        ["helm", "template", "mq", str(folder / "dledger"), *options],
        capture_output=True, text=True, check=True, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_helm_takes_the_chart(replicas: int, tmp_path: Path) -> None:
    documents = helm_documents(tmp_path, f"broker.replicas={replicas}")
    assert sorted(document["kind"] for document in documents) == sorted(
        ["Secret", *["Service", "PodDisruptionBudget", "StatefulSet"] * 2]
    )
    (broker,) = [
        document
        for document in documents
        if document["kind"] == "StatefulSet" and document["metadata"]["name"] == "mq-broker"
    ]
    (container,) = broker["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert script.count(":20911") == replicas
    assert "n0-mq-broker-0.mq-broker.default.svc.cluster.local:20911" in script
    run_if_here("sh", "-n", "-c", script)


def test_helm_adds_proxies_and_a_console(tmp_path: Path) -> None:
    documents = helm_documents(tmp_path, "proxy.replicas=2", "console.replicas=1")
    found = {
        document["metadata"]["name"]: document["spec"]
        for document in documents
        if document["kind"] == "Deployment"
    }
    assert {name: spec["replicas"] for name, spec in found.items()} == {
        "mq-proxy": 2,
        "mq-console": 1,
    }
    (proxy,) = found["mq-proxy"]["template"]["spec"]["containers"]
    assert main([*proxy["args"], "-p"]) == 0
    assert "--advertised=mq-proxy.default.svc.cluster.local:8081" in proxy["args"]
    (console,) = found["mq-console"]["template"]["spec"]["containers"]
    assert console["args"][0] == "console"
    assert console["readinessProbe"]["httpGet"]["httpHeaders"] == [
        {"name": "Host", "value": "localhost"}
    ]
