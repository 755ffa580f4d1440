"""Units for systemd: a NameServer and a broker, which report when they are ready."""

from __future__ import annotations

from typing import Final

_HARDENED: Final = """\
User=dledger
Group=dledger
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
"""

_UNIT: Final = """\
[Unit]
Description={about}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=60
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Restart=on-failure
RestartSec=2
# A broker hands its leadership over and answers what it has taken before it ends.
TimeoutStopSec=60
WatchdogSec=30
LimitNOFILE=1048576
{folders}
{hardened}
[Install]
WantedBy=multi-user.target
"""


def systemd_files(folder: str) -> dict[str, str]:
    """Return units, their user, and examples of what they read, by file name.

    Args:
        folder: Where the programs are, e.g. ``/opt/dledger/bin``; not below ``/home`` or ``/root``,
            which the units do not see.
    """
    broker = f"{folder}/dledger-broker -c /etc/dledger/broker.toml --log-form json"
    namesrv = f"{folder}/dledger-namesrv -c /etc/dledger/namesrv.toml --log-form json"
    own = "StateDirectory=dledger\nStateDirectoryMode=0700\nConfigurationDirectory=dledger"
    # Both run on one machine, so each has a folder of its own.
    named = own.replace("StateDirectory=dledger", "StateDirectory=dledger-namesrv")
    return {
        "dledger-broker.service": _unit("dledger broker", broker, own),
        "dledger-namesrv.service": _unit("dledger NameServer", namesrv, named),
        "dledger.sysusers.conf": 'u dledger - "dledger" /var/lib/dledger\n',
        "broker.toml": (
            "# One member; the same on all of a group but for self_id and broker_ip1.\n"
            '[broker]\nnamesrv_addr = "127.0.0.1:9876"\n\n'
            '[store]\npath_root_dir = "/var/lib/dledger"\n\n'
            '[raft]\ngroup = "broker-a"\nself_id = "n0"\npeers = "n0-127.0.0.1:20911"\n\n'
            "[metrics]\nlisten_port = 5557\n"
        ),
        "namesrv.toml": (
            "[server]\nlisten_port = 9876\nmetrics_listen_port = 5558\n\n"
            '[namesrv]\nkv_config_path = "/var/lib/dledger-namesrv/kvConfig.json"\n'
        ),
    }


def _unit(about: str, command: str, folders: str) -> str:
    return _UNIT.format(about=about, command=command, folders=folders, hardened=_HARDENED)
