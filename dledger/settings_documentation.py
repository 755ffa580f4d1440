"""The table of settings in ``docs/configuration.md``, read off the settings themselves."""

from __future__ import annotations

import sys
from pathlib import Path

from dledger.settings_ignored import REASONS
from dledger.settings_refused import IN_SYNC_KEYS, MASTER_AND_SLAVE_KEYS, REFUSED_KEYS
from dledger.settings_tables import SETTINGS, TABLES
from dledger.settings_values import default_text

BEGIN = "<!-- settings -->\n"
END = "<!-- end of settings -->"


def settings_markdown() -> str:
    """Return one table per TOML table, and the ignored keys by reason."""
    parts: list[str] = []
    for table, struct in TABLES.items():
        about = (struct.__doc__ or "").partition(": ")[2].rstrip(".")
        parts.append(f"\n### `[{table}]` {about}\n\n")
        parts.append("| setting | RocketMQ key | default | meaning |\n|---|---|---|---|\n")
        for setting in SETTINGS.values():
            if setting.table != table:
                continue
            keys = ", ".join(f"`{key}`" for key in setting.keys) or "none"
            default = default_text(setting.path)
            shown = f"`{default}`" if default else "empty"
            parts.append(f"| `{setting.name}` | {keys} | {shown} | {setting.about} |\n")
    parts.append("\n### Accepted, with a warning\n\n")
    for reason, keys in REASONS.items():
        listed = ", ".join(f"`{key}`" for key in keys.split())
        parts.append(f"{reason[0].upper()}{reason[1:]}: {listed}.\n\n")
    parts.append("### Refused, unless they ask for nothing\n\n")
    parts += [f"* `{key}`: {reason}.\n" for key, reason in REFUSED_KEYS.items()]
    slaves = ", ".join(f"`{key}`" for key in MASTER_AND_SLAVE_KEYS)
    parts.append(
        f"* {slaves}, and `brokerRole = SLAVE`: a broker that copies another one needs"
        " `dLegerPeers`, the members of its group; see"
        " [from-master-slave.md](from-master-slave.md).\n"
    )
    in_sync = ", ".join(f"`{key}`" for key in sorted(IN_SYNC_KEYS))
    parts.append(f"* {in_sync}: more than a majority of the members is refused.\n")
    parts.append("\n")
    return "".join(parts)


def rewrite(path: Path) -> None:
    """Put the current tables between the marks of the page at *path*."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}{settings_markdown()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
