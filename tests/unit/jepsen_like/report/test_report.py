"""A page shows what its run folder holds: verdict, numbers, witnesses; and what is missing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest

from dledger.jepsen_like.chaos.recorder import Recorder
from dledger.jepsen_like.history.operation import NEVER, Event, F, Operation, Outcome, RunHeader
from dledger.jepsen_like.report.pictures import Pictures
from dledger.jepsen_like.report.run_folder import read_run
from dledger.jepsen_like.report.run_report import report
from dledger.jepsen_like.report.series import NS, Leadership, Span
from tests.harness.run_folders import NODES, MadeRun, make_run, write_run

pytestmark = pytest.mark.slow

DURATION_S = 120
OPERATIONS = 5_000
SECTIONS = (
    *("verdict", "numbers", "latency", "rate", "leader", "lag", "availability", "failover"),
    *("order", "faults", "anomalies", "logs", "plan", "command"),
)
DRAWN = ("latency", "rate", "leader", "lag", "availability", "failover", "order-1", "faults")


class PageReader(HTMLParser):
    """Text, rows of tables and number of drawings of each section, and every id of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.pictures: dict[str, int] = {}
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._section = ""
        self._is_in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.attributes += list(known.items())
        if "id" in known:
            self.ids.append(known["id"])
        if tag == "section":
            self._section = known["id"]
            self.text[self._section] = ""
            self.rows[self._section] = []
            self.pictures[self._section] = 0
        elif tag == "svg":
            self.pictures[self._section] += 1
        elif tag == "tr":
            self.rows[self._section].append([])
        elif tag in ("td", "th"):
            self.rows[self._section][-1].append("")
            self._is_in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._section = ""
        elif tag in ("td", "th"):
            self._is_in_cell = False

    def handle_data(self, data: str) -> None:
        if not self._section:
            return
        self.text[self._section] += data
        if self._is_in_cell:
            self.rows[self._section][-1][-1] += data


def words(text: str) -> str:
    return " ".join(text.split())


def label_of(page: PageReader, begin: str) -> str:
    """Return the label of the picture that begins so."""
    labels = [value for name, value in page.attributes if name == "aria-label"]
    return next(label for label in labels if label.startswith(begin))


@pytest.fixture(scope="module")
def made() -> MadeRun:
    return make_run(operations=OPERATIONS, duration_s=DURATION_S, faults=3, stale_read=True)


@pytest.fixture(scope="module")
def folder(made: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "made", made, duration_s=DURATION_S)
    assert report(folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> PageReader:
    return PageReader((folder / "report.html").read_text())


def test_report_sections_in_order_and_not_empty(page: PageReader) -> None:
    assert tuple(page.text) == SECTIONS
    assert [name for name, text in page.text.items() if len(words(text)) < 20] == []


def test_no_id_stands_twice(page: PageReader) -> None:
    assert len(page.ids) == len(set(page.ids))


def test_verdict_is_first_violation_with_two_operations(made: MadeRun, page: PageReader) -> None:
    violation = made.verdicts[0].violations[0]
    assert violation.name == "stale read"
    assert len(violation.operations) == 2
    said = words(page.text["verdict"])
    assert said.startswith(f"invalid: stale read in {violation.subject}: {violation.detail}")
    for op_id in violation.operations:
        assert f"[operation {op_id}: " in said


def test_the_numbers_are_the_counts_of_the_history(made: MadeRun, page: PageReader) -> None:
    rows = {row[0]: row[1:] for row in page.rows["numbers"]}
    assert rows["operation"] == ["ok", "info", "fail", "all"]
    for f in (F.SEND, F.PULL, F.MAX_OFFSET):
        counts = [
            sum(op.f == f and op.outcome == outcome for op in made.history.operations)
            for outcome in Outcome
        ]
        assert counts[0] > 0
        assert rows[f.name.lower()] == [f"{count:,}" for count in (*counts, sum(counts))]
    assert rows["all"][-1] == f"{OPERATIONS:,}"
    assert rows["queue_log"][0] == "invalid"


def test_nothing_is_asked_for_from_outside(folder: Path, page: PageReader) -> None:
    html = (folder / "report.html").read_text()
    rest = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", html)
    assert "http://" not in rest
    assert "https://" not in rest
    links = [value for name, value in page.attributes if name in ("href", "src", "xlink:href")]
    assert links
    assert [link for link in links if not link.startswith("#")] == []
    assert [link for link in links if link[1:] not in page.ids] == []


def test_every_picture_is_in_the_page_and_beside_it(folder: Path, page: PageReader) -> None:
    drawn = {name: count for name, count in page.pictures.items() if count}
    assert drawn == dict.fromkeys((name.removesuffix("-1") for name in DRAWN), 1)
    files = sorted(path.stem for path in (folder / "pictures").iterdir())
    assert files == sorted(DRAWN)
    for name in DRAWN:
        pixels = matplotlib.image.imread(folder / "pictures" / f"{name}.png")
        assert pixels.shape[0] > 100, name
        assert 1000 < pixels.shape[1] < 3000, name
        assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, 4).tolist()}) > 3, name


def test_plots_name_their_lines_and_the_bands_of_faults(page: PageReader) -> None:
    lines = {
        "latency": ("p50 (median)", "p99", "slowest"),
        "rate": ("ok", "info (not known)", "fail (not done)"),
        "lag": NODES,
    }
    for name, own in lines.items():
        expected = (*own, "kill", "isolate", "disk slow")
        assert [word for word in expected if word not in page.text[name]] == [], name


def test_the_moment_of_healing_is_marked(tmp_path: Path) -> None:
    span = Span(0, 10 * NS, 1)
    healed = Pictures(tmp_path, span, [], ["n0"], 5.0).leader([Leadership("n0", 3, 1.0, 9.0)], {})
    never = Pictures(tmp_path, span, [], ["n0"]).leader([Leadership("n0", 3, 1.0, 9.0)], {})
    assert "all healed" in healed
    assert "all healed" not in never


def test_many_anomalies_are_counted_and_the_rest_is_hidden(tmp_path: Path) -> None:
    violations = [{"name": "stale read", "subject": f"t/{n}", "detail": "…"} for n in range(120)]
    verdicts = [{"checker": "queue_log", "validity": "invalid", "violations": violations}]
    reported = {"verdict": "invalid", "verdicts": verdicts, "lost": 0, "duplicated": 7}
    (tmp_path / "result.json").write_text(json.dumps(reported))
    page = PageReader(report(tmp_path).read_text())
    rows = page.rows["anomalies"]
    assert rows[1] == ["stale read", "", "120"]
    assert [row[1] for row in rows if row[1].startswith("t/")] == [f"t/{n}" for n in range(100)]
    assert "90 more" in page.text["anomalies"]
    assert "20 more are in result.json" in page.text["anomalies"]
    assert re.search(r"lost0duplicated7", page.text["numbers"])


def test_terms_stand_in_the_ribbon(made: MadeRun, page: PageReader) -> None:
    terms = re.findall(r"leader term (\d+)", " ".join(e.detail for e in made.history.events))
    assert len(terms) == 4
    assert f"4 terms, newest term {terms[-1]}." in page.text["leader"]
    assert set(terms) <= set(page.text["leader"].split())
    assert all(f"{node} leads" in page.text["leader"] for node in NODES)
    assert f"term {terms[-1]} from" in label_of(page, "Leaders: ")


def test_a_node_that_never_led_has_an_empty_lane(tmp_path: Path) -> None:
    draw = Pictures(tmp_path, Span(0, 10 * NS, 1), [], ["n0", "n1"])
    svg = draw.leader([Leadership("n1", 3, 1.0, 9.0)], {})
    assert "n0 leads" in svg
    assert (tmp_path / "leader.png").exists()


def test_the_anomalies_name_their_witnesses(made: MadeRun, page: PageReader) -> None:
    violations = made.verdicts[0].violations
    rows = page.rows["anomalies"][1:]
    assert len(rows) == len(violations)
    for row, violation in zip(rows, violations, strict=True):
        assert row[1] == violation.subject
        assert violation.detail in row[2]
        for op_id in violation.operations:
            assert f"operation {op_id}: " in row[2]


def test_the_order_picture_marks_the_witnesses(made: MadeRun, page: PageReader) -> None:
    violation = made.verdicts[0].violations[0]
    label = label_of(page, f"Offsets over time in {violation.subject}.")
    for op_id in violation.operations:
        assert f"(op {op_id})" in page.text["order"]
        assert f"operation {op_id}: " in label


def test_the_label_of_availability_has_the_outages(made: MadeRun, page: PageReader) -> None:
    assert re.search(r"\d+ of \d+ seconds \(\d+\.\d%\)", page.text["availability"])
    label = label_of(page, "No send was acknowledged")
    spells = [(float(a), float(b)) for a, b in re.findall(r"(\d+) to (\d+) s", label)]
    long = [(a, b) for a, b in made.outages_s if b - a > 2.5]
    assert long, "no outage is long enough to be seen: choose another seed"
    for begin, end in long:
        assert any(a <= begin + 2 and b >= end - 2 for a, b in spells), (begin, end, spells)


def test_logs_are_cut_to_their_end(page: PageReader) -> None:
    text = page.text["logs"]
    assert "n1 entry_applied index=449" in text
    assert "n1 entry_applied index=250" in text
    assert "index=249" not in text


def test_plan_faults_and_command(made: MadeRun, page: PageReader) -> None:
    events = [e for e in made.history.events if e.kind != "role"]
    done = [[e.kind.replace("_", " "), e.node] for e in events if "skipped" not in e.detail]
    assert [row[1:3] for row in page.rows["faults"]][1 : 1 + len(done)] == done
    assert '"duration_ms": 120000' in page.text["plan"]
    assert ["wipe", "1", "too few members would be left"] in page.rows["faults"]
    assert "dledger chaos run --seed 1" in page.text["command"]


def test_the_page_is_the_same_when_it_is_made_again(folder: Path) -> None:
    first = (folder / "report.html").read_bytes()
    assert report(folder).read_bytes() == first


def test_report_of_a_valid_run_states_what_was_checked(tmp_path: Path) -> None:
    made = make_run(operations=2_000, duration_s=60, faults=3)
    folder = write_run(tmp_path / "good", made, duration_s=60)
    reported = json.loads((folder / "result.json").read_text())
    reported["verdicts"].append({"checker": "total_queue", "validity": "valid"})
    (folder / "result.json").write_text(json.dumps(reported))
    acked = sum(op.outcome == Outcome.OK for op in made.history.operations)
    page = PageReader(report(folder).read_text())
    assert words(page.text["verdict"]) == (
        f"valid: {acked:,} acknowledged operations over 3 faults of 3 kinds; "
        "nothing lost, nothing doubled"
    )
    assert page.pictures["order"] == 0
    assert "No violation names operations" in page.text["order"]
    assert "2 of 2 checkers say valid" in page.text["anomalies"]


def test_rows_of_a_real_run_count_once_as_they_were_written_last(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "history", RunHeader("real"))
    op = Operation(0, 0, 1, -1, F.SEND, Outcome.INFO, 5, NEVER, "orders", 0)
    fault = Event(3, 3, "kill", "leader")
    recorder.note(op)
    recorder.note(fault)
    recorder.write()
    op.outcome, op.ret_ns, op.off = Outcome.OK, 9, 0
    fault.node, fault.end_ns = "n1", 8
    recorder.note(op)
    recorder.note(fault, True)
    recorder.close()
    run = read_run(tmp_path)
    assert [(op.op_id, op.outcome) for op in run.history.operations] == [(0, Outcome.OK)]
    assert [(event.node, event.end_ns) for event in run.history.events] == [("n1", 8)]


def test_report_of_an_empty_folder_states_it(tmp_path: Path) -> None:
    page = PageReader(report(tmp_path).read_text())
    assert tuple(page.text) == SECTIONS
    assert page.text["verdict"].startswith("\nunknown: there is no result.json")
    assert "There is no history" in page.text["verdict"]
    assert "No samples of a leader" in page.text["lag"]
    assert "No logs were kept" in page.text["logs"]
    assert "No command was written down" in page.text["command"]
    assert sum(page.pictures.values()) == 0


def test_valid_over_nothing_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"verdict": "valid"}')
    page = PageReader(report(tmp_path).read_text())
    assert words(page.text["verdict"]).startswith("unknown: the result is valid, but no")


def test_a_torn_history_gives_a_page_of_what_is_left(tmp_path: Path) -> None:
    made = make_run(operations=1_000, duration_s=60, faults=3)
    folder = write_run(tmp_path / "torn", made, duration_s=60)
    path = folder / "history" / "client-1.cbor"
    path.write_bytes(path.read_bytes()[:-3])
    page = PageReader(report(folder).read_text())
    said = words(page.text["verdict"])
    assert "the history shown here is torn or damaged" in said
    assert re.search(r"history/client-1.cbor: torn: \d+ bytes at its end are no whole row", said)
    assert "result.json and the history differ in their counts" in said
    assert page.rows["numbers"][4] == ["all", *page.rows["numbers"][4][1:4], "999"]


def test_damage_in_the_middle_keeps_what_stands_before_it(tmp_path: Path) -> None:
    made = make_run(operations=1_000, duration_s=60, faults=3)
    folder = write_run(tmp_path / "rotten", made, duration_s=60)
    path = folder / "history" / "client-1.cbor"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] + b"\xff" + raw[len(raw) // 2 :])
    page = PageReader(report(folder).read_text())
    assert "history/client-1.cbor: damaged after " in page.text["verdict"]
    total = int(page.rows["numbers"][4][-1].replace(",", ""))
    assert 500 < total < 1_000


def test_markup_in_a_folder_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    (tmp_path / "result.json").write_text(json.dumps({"reason": evil, "command": evil}))
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "n1.log").write_text(evil)
    html = report(tmp_path).read_text()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3


def test_a_bad_field_of_the_result_costs_that_field_only(tmp_path: Path) -> None:
    reported = {"verdict": "unknown", "reason": "it broke", "failover_ms": "soon", "command": "a b"}
    (tmp_path / "result.json").write_text(json.dumps(reported))
    page = PageReader(report(tmp_path).read_text())
    assert words(page.text["verdict"]).startswith("unknown: it broke")
    assert "result.json, failover_ms: " in page.text["verdict"]
    assert "a b" in page.text["command"]
