"""The files in `deploy/`: what they name is there, and the tools they are for take them."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dledger.cli.main import main
from tests.harness.deployed_files import (
    DEPLOY,
    alerts,
    board,
    compose_services,
    metrics_of,
    watched_queries,
)
from tests.harness.shipped_files import ROOT

CHART = DEPLOY / "helm" / "dledger"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def run_if_here(*command: str, cwd: Path | None = None) -> str:
    """Run a tool, if this machine has it, see that it is content, and return what it prints."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not here")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return the settings that a daemon prints; an option that it does not know is an error."""
    assert main([*command, "-p"]) == 0
    return re.sub(" +", " ", capsys.readouterr().out)


# ------------------------------------------------------------------------------ board and alerts


def test_board_and_alerts_ask_for_metrics_that_there_are() -> None:
    """The page has the metrics that daemons show, as another test proves."""
    page = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    documented = set(re.findall(r"`((?:rocketmq|dledger)_[a-z_]+)`", page)) | {"up"}
    asked = set().union(*map(metrics_of, watched_queries()))
    assert asked <= documented
    assert len(asked) > 25


def test_a_metric_that_is_not_there_is_found() -> None:
    assert metrics_of('sum by (le) (rate(dledger_nonsense{a="rocketmq_x"}[5m]))') == {
        "dledger_nonsense"
    }
    assert metrics_of("rocketmq_rpc_latency_bucket / up") == {"rocketmq_rpc_latency", "up"}


def test_every_alert_has_a_section_that_helps() -> None:
    page = (ROOT / "docs" / "operate" / "alerts.md").read_text()
    sections = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert [rule["alert"] for rule in alerts()] == [f"Dledger{name}" for name in sections]
    assert [rule["annotations"]["runbook_url"] for rule in alerts()] == [
        f"docs/operate/alerts.md#{name.lower()}" for name in sections
    ]


def test_prometheus_takes_configuration_and_rules() -> None:
    folder = DEPLOY / "prometheus"
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    run_if_here("promtool", "check", "rules", str(folder / "alerts.yml"))
    run_if_here("promtool", "check", "config", str(folder / "prometheus.yml"))


def test_every_alert_fires_where_it_must() -> None:
    cases = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text())["tests"]
    fired = {
        asked["alertname"]
        for case in cases
        for asked in case["alert_rule_test"]
        if asked["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in alerts()}
    run_if_here("promtool", "test", "rules", str(DEPLOY / "prometheus" / "alerts_test.yml"))


# ------------------------------------------------------------------------------ moving address


def test_haproxy_takes_its_configuration() -> None:
    run_if_here("haproxy", "-c", "-f", str(DEPLOY / "haproxy" / "haproxy.cfg"))


def test_keepalived_takes_its_configuration() -> None:
    """It prints what it does not take; at its end it may send SIGTERM to its own group."""
    if shutil.which("keepalived") is None:
        pytest.skip("keepalived is not here")
    file = str(DEPLOY / "keepalived" / "keepalived.conf")
    command = ["keepalived", "--config-test", "--log-console", "--dont-fork", "-f", file]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, start_new_session=True, timeout=60
    )
    assert (done.stdout + done.stderr, done.returncode in (0, -15)) == ("", True)


# ------------------------------------------------------------------------------ the board


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
    for unit in UNITS:
        text = unit.read_text()
        for line in (
            "Type=notify",
            "NoNewPrivileges=yes",
            "ProtectSystem=strict",
            "WatchdogSec=30",
        ):
            assert f"\n{line}\n" in text
        program = tmp_path / f"{unit.stem}"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        (tmp_path / unit.name).write_text(text.replace("/opt/dledger/bin", str(tmp_path)))
    run_if_here("systemd-analyze", "verify", *(str(tmp_path / unit.name) for unit in UNITS))


@pytest.mark.parametrize("name", ["broker", "namesrv"])
def test_commands_and_settings_of_units_are_known(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = re.findall(
        r"^ExecStart=/opt/dledger/bin/dledger-(.+)$",
        (DEPLOY / "systemd" / f"dledger-{name}.service").read_text(),
        re.MULTILINE,
    )
    words = command.replace("/etc/dledger", str(DEPLOY / "systemd")).split()
    assert "/var/lib/dledger" in printed(capsys, *words)


# ------------------------------------------------------------------------------ containers


def test_containers_have_no_rights_and_no_ports_on_networks() -> None:
    found = compose_services()
    daemons = ["console", "n0", "n1", "n2", "namesrv0", "namesrv1", "namesrv2", "proxy"]
    assert sorted(found) == [*daemons, "secret"]
    for service in found.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    published = [port for service in found.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len(published) == len(set(published)) == 6
    text = (DEPLOY / "compose" / "Containerfile").read_text()
    assert "\nUSER 10001:10001\n" in text
    assert "/readyz" in text


@pytest.mark.parametrize("advertise", ["", "192.0.2.7"])
def test_options_of_containers_are_settings(
    advertise: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    services = compose_services({"ADVERTISE": advertise} if advertise else {})
    for name in ("n0", "n1", "n2"):
        shown = printed(capsys, *services[name]["command"])
        assert f"\nbroker.broker_ip1 = {advertise or name} " in shown
        assert "\nraft.peers = n0-n0:20911;n1-n1:20911;n2-n2:20911 " in shown
    shown = printed(capsys, *services["proxy"]["command"])
    for line in (
        "server.listen = 0.0.0.0:8081",
        f"server.advertised = {advertise or 'proxy'}:8081",
        "metrics.listen_host = 0.0.0.0",
        "metrics.listen_port = 5557",
        "proxy.namesrv_addr = namesrv0:9876;namesrv1:9876;namesrv2:9876",
    ):
        assert line in shown


def test_brokers_for_clients_outside_have_ports_of_their_own() -> None:
    found = compose_services({"LISTEN": "0.0.0.0"})
    assert [found[name]["ports"] for name in ("n0", "n1", "n2")] == [
        ["0.0.0.0:10911:10911"], ["0.0.0.0:10921:10921"], ["0.0.0.0:10931:10931"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["namesrv0", "secret"])
def test_scripts_of_containers_are_shell(name: str) -> None:
    (_, script) = compose_services()[name]["command"]
    run_if_here("sh", "-n", "-c", script)


def test_compose_takes_the_file() -> None:
    folder = DEPLOY / "compose"
    if shutil.which("docker-compose") is not None:
        run_if_here("docker-compose", "config", "--quiet", cwd=folder)
    elif _has_docker_compose():
        run_if_here("docker", "compose", "config", "--quiet", cwd=folder)
    else:
        pytest.skip("neither docker-compose nor docker compose is here")


def _has_docker_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return done.returncode == 0


# ------------------------------------------------------------------------------ Helm


def test_chart_names_only_values_and_templates_that_there_are() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "dledger")
    text = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
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


def test_options_in_the_chart_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """What follows `dledger broker` and the like in a template is an option of that command."""
    for template in ("broker", "namesrv", "proxy", "console"):
        assert main([template, "--help"]) == 0
        known = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))
        text = (CHART / "templates" / f"{template}.yaml").read_text()
        assert set(re.findall(r"(?<=[\s\"])--[a-z][\w-]+", text)) <= known


def helm_documents(home: Path, *settings: str) -> list[dict[str, Any]]:
    """Return what helm makes of the chart with *settings*; it must be content with both."""
    options = [*(part for one in settings for part in ("--set", one)), "--kube-version", "1.29.0"]
    run_if_here("helm", "lint", "--strict", str(CHART), *options)
    done = subprocess.run(
        ["helm", "template", "mq", str(CHART), *options],
        capture_output=True, text=True, check=True, env={**os.environ, "HOME": str(home)},
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


def test_helm_adds_a_service_of_the_leader(tmp_path: Path) -> None:
    documents = helm_documents(tmp_path, "broker.leaderService=true")
    there = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert there["Service", "mq-leader"]["spec"]["selector"]["dledger/role"] == "leader"
    hook = (CHART / "files" / "pod_role.py").read_text()
    assert there["ConfigMap", "mq-broker"]["data"]["pod_role.py"].strip() == hook.strip()
    (rule,) = there["Role", "mq-broker"]["rules"]
    assert (rule["resources"], rule["verbs"]) == (["pods"], ["list", "patch"])
    pod = there["StatefulSet", "mq-broker"]["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("mq-broker", True)
    (container,) = pod["containers"]
    (script,) = container["args"]
    run_if_here("sh", "-n", "-c", script)
    assert '"broker.leader_address=mq-leader.default.svc.cluster.local:10911"' in script
    assert "/etc/dledger-hook/pod_role.py" in script
    assert {"/etc/dledger-hook"} <= {each["mountPath"] for each in container["volumeMounts"]}


def test_helm_adds_proxies_and_a_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    printed(capsys, *proxy["args"])
    assert "--advertised=mq-proxy.default.svc.cluster.local:8081" in proxy["args"]
    (console,) = found["mq-console"]["template"]["spec"]["containers"]
    assert console["args"][0] == "console"
    assert console["readinessProbe"]["httpGet"]["httpHeaders"] == [
        {"name": "Host", "value": "localhost"}
    ]
