"""The page: everything in it as plain values, and the template that lays it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dledger.jepsen_like.report.run_folder import Skipped

PAGE_TEMPLATE: Final = "page.html.j2"


@dataclass(frozen=True, slots=True)
class PageFigure:
    """One picture."""

    svg: Markup
    alt: str
    below: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A section with pictures."""

    id: str
    title: str
    caption: str
    figures: tuple[PageFigure, ...] = ()
    empty: str = ""


@dataclass(frozen=True, slots=True)
class OperationRow:
    """A row of the table of numbers; the last row is the sum."""

    name: str
    ok: int
    info: int
    fail: int

    @property
    def total(self) -> int:
        """However they ended."""
        return self.ok + self.info + self.fail


@dataclass(frozen=True, slots=True)
class FaultRow:
    """A row of the table of faults."""

    at: str
    kind: str
    node: str
    lasted: str


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A row of the table of anomalies."""

    name: str
    checker: str
    subject: str
    detail: str
    at: str
    witnesses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """All that a page states, in its order."""

    name: str
    headline: tuple[str, ...]
    verdict: str
    sentence: str
    notes: tuple[str, ...]
    operations: tuple[OperationRow, ...]
    facts: tuple[tuple[str, str], ...]
    checkers: tuple[tuple[str, str, str], ...]
    pictures: tuple[Part, ...]
    skipped: tuple[Skipped, ...]
    faults: tuple[FaultRow, ...]
    faults_left: int
    anomaly_counts: tuple[tuple[str, str, int], ...]
    anomalies: tuple[Anomaly, ...]
    more_anomalies: tuple[Anomaly, ...]
    anomalies_left: int
    no_anomalies: str
    logs: tuple[tuple[str, list[str]], ...]
    plan: str
    command: str
    asked: str
    minimize: str

    @property
    def skipped_count(self) -> int:
        """Faults that were not done."""
        return sum(row.count for row in self.skipped)

    @property
    def contents(self) -> tuple[tuple[str, str], ...]:
        """Id and title of each section."""
        return (
            ("verdict", "Verdict"),
            ("numbers", "Numbers"),
            *((part.id, part.title) for part in self.pictures),
            ("anomalies", "Anomalies"),
            ("logs", "Node logs"),
            ("plan", "Plan"),
            ("command", "Do it again"),
        )


def environment() -> Environment:
    """Return what renders this package's templates; everything that is not markup is escaped."""
    return Environment(
        loader=PackageLoader("dledger.jepsen_like.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )


def render(page: Page) -> str:
    """Return the page as HTML that asks for nothing from outside."""
    return environment().get_template(PAGE_TEMPLATE).render(page=page)
