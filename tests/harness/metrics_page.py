"""A page of metrics read back, as strictly as a scraper does."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

COMMON = ("cluster", "node_type", "node_id", "member")


@dataclass
class MetricsPage:
    """Families and series of one page."""

    kinds: dict[str, str] = field(default_factory=dict)
    series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> MetricsPage:
        """Return what stands there; everything of a family must stand together and once."""
        page, current = cls(), ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                current = line.split(" ")[2]
                assert current not in page.kinds, f"{current} stands there twice"
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert name == current
                page.kinds[name] = kind
            else:
                match = _LINE.fullmatch(line)
                assert match is not None, line
                name = match[1]
                if page.kinds[current] == "histogram":
                    name = re.sub("_(bucket|sum|count)$", "", name)
                assert name == current, line
                key = (match[1], tuple(sorted(_LABEL.findall(match[2] or ""))))
                assert key not in page.series, line
                page.series[key] = float(match[3])
        return page

    def of(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric by these labels."""
        return {
            tuple(dict(of)[label] for label in labels): value
            for (known, of), value in self.series.items()
            if known == name
        }

    def value(self, name: str) -> float:
        """Return the value of the only series of a metric."""
        (value,) = (value for (known, _), value in self.series.items() if known == name)
        return value

    def labels(self, name: str) -> list[dict[str, str]]:
        """Return the labels of each series of a metric."""
        return [dict(of) for known, of in self.series if known == name]
