"""The settings on pages of the documentation: ``python -m tests.harness.settings_page``."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger.namesrv.config import SCHEMA as NAMESRV_SCHEMA
from dledger.settings.config import SCHEMA
from dledger.settings.text import IN_SYNC_KEYS, MASTER_AND_SLAVE_KEYS, REASONS, REFUSED
from tests.harness.shipped_files import ROOT

BEGIN: Final = "<!-- settings -->\n"
END: Final = "<!-- end of settings -->"


def settings_markdown() -> str:
    """Return one table per TOML table, and the ignored keys by reason."""
    parts: list[str] = []
    for table, struct in SCHEMA.tables.items():
        about = (struct.__doc__ or "").partition(": ")[2].rstrip(".")
        parts.append(f"\n### `[{table}]` {about}\n\n")
        parts.append("| setting | RocketMQ key | default | meaning |\n|---|---|---|---|\n")
        for setting in SCHEMA.settings.values():
            if setting.table != table:
                continue
            keys = ", ".join(f"`{key}`" for key in setting.keys) or "none"
            default = setting.default_text
            shown = f"`{default}`" if default else "empty"
            parts.append(f"| `{setting.name}` | {keys} | {shown} | {setting.about} |\n")
    parts.append("\n### Accepted, with a warning\n\n")
    for reason, names in REASONS.items():
        listed = ", ".join(f"`{key}`" for key in names.split())
        parts.append(f"{reason[0].upper()}{reason[1:]}: {listed}.\n\n")
    parts.append("### Refused, unless they ask for nothing\n\n")
    parts += [f"* `{key}`: {refused.reason}.\n" for key, refused in REFUSED.items()]
    slaves = ", ".join(f"`{key}`" for key in MASTER_AND_SLAVE_KEYS)
    parts.append(
        f"* {slaves}, and `brokerRole = SLAVE`: a broker that copies another one needs"
        " `dLegerPeers`, the members of its group; see"
        " [From masters and slaves to here](../operate/from-master-slave.md).\n"
    )
    in_sync = ", ".join(f"`{key}`" for key in sorted(IN_SYNC_KEYS))
    parts.append(f"* {in_sync}: more than a majority of the members is refused.\n")
    parts.append("\n")
    return "".join(parts)


def live_settings_markdown() -> str:
    """Return a table of the settings that change at run time, and from when on a change counts."""
    parts = ["\n| setting | from then on |\n|---|---|\n"]
    for schema, where in ((SCHEMA, ""), (NAMESRV_SCHEMA, "NameServer: ")):
        names: dict[str, list[str]] = {}
        for setting in schema.settings.values():
            if setting.live:
                names.setdefault(setting.live, []).append(f"`{(*setting.keys, setting.path)[0]}`")
        parts += [f"| {where}{', '.join(found)} | {live} |\n" for live, found in names.items()]
    return "".join([*parts, "\n"])


PAGES: Final[dict[Path, Callable[[], str]]] = {
    ROOT / "docs" / "reference" / "configuration.md": settings_markdown,
    ROOT / "docs" / "operate" / "configuration-at-run-time.md": live_settings_markdown,
}


def with_settings(page: Path) -> str:
    """Return a page with the present tables between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{PAGES[page]()}{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_settings(page))
