"""The figures of all runs so far, as a table for people and as a document of JSON. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tests.fail_over.figures import Figures
from tests.fail_over.tables import Client, Fault

TIMES = {
    "send_gap_ms": "sends s",
    "consume_gap_ms": "consumption s",
    "delivery_ms": "delivery s",
    "idle_gap_ms": "before s",
}
COUNTS = ("acknowledged", "errors", "lost", "twice", "reordered", "unconsumed")


@dataclass
class Measured:
    """Figures by fault, client and stream, and what a reader has to know of them."""

    runs: dict[tuple[str, str, str], list[Figures]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, fault: str, found: Mapping[str, Mapping[str, Figures]]) -> None:
        """Add what one run found, by client and stream."""
        for client, streams in found.items():
            for stream, figures in streams.items():
                self.runs.setdefault((fault, client, stream), []).append(figures)

    def document(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return all of it, with *about* before it."""
        rows = [
            {
                "fault": fault,
                "client": client,
                "stream": stream,
                "summary": summary(runs),
                "runs": [asdict(each) for each in runs],
            }
            for (fault, client, stream), runs in self.runs.items()
        ]
        return {**about, "notes": self.notes, "rows": rows}

    def table(self, titles: Mapping[str, Client | Fault]) -> Iterator[str]:
        """Yield the lines of a table in Markdown for each fault, then the notes."""
        columns = " | ".join(["client", "topic", *TIMES.values(), *COUNTS])
        for fault in dict.fromkeys(fault for fault, _, _ in self.runs):
            yield f"\n{titles[fault].title}: times median / longest of the runs, counts summed\n"
            yield f"| {columns} |"
            yield f"|{'---|' * (2 + len(TIMES) + len(COUNTS))}"
            for (at, client, stream), runs in self.runs.items():
                if at == fault:
                    yield f"| {' | '.join([titles[client].title, stream, *_cells(runs)])} |"
        yield from (f"\n{note}" for note in self.notes)


def summary(runs: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Return median and maximum of each figure."""
    values = {name: [getattr(run, name) for run in runs] for name in (*TIMES, *COUNTS)}
    return {name: {"median": median(each), "max": max(each)} for name, each in values.items()}


def _cells(runs: Sequence[Figures]) -> Iterator[str]:
    found = summary(runs)
    for name in TIMES:
        yield f"{found[name]['median'] / 1000:.2f} / {found[name]['max'] / 1000:.2f}"
    for name in COUNTS:
        yield str(sum(getattr(run, name) for run in runs))
