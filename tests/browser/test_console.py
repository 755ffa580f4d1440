"""The console in a real browser, over a real cluster: every page, every action, a leader killed."""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from hypercorn.config import Config
from playwright.sync_api import Browser, Page, expect

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.blocking import LoopThread
from dledger.console.command import serve
from dledger.console.console import PAGES, ConsoleSettings
from tests.browser.conftest import Looker
from tests.harness.console_content import HOSTILE, HOSTILE_KEY, SETTINGS, filled
from tests.harness.module_cluster import heal

pytestmark = pytest.mark.slow

WAIT_MS = 60_000
"""A limit for a hang: an election takes a second or two."""

LOOKS_MAX = 5
"""Pages that name a broker which does not answer, one after the other: each waits for it."""

MORE_PAGES = (
    "/topic?name=orders",
    "/group?name=billing",
    "/group/plan?name=reports&topic=orders&to=first",
    "/messages?by=key&topic=orders&wanted=order-5",
    "/messages?by=queue&topic=orders&broker=broker-a&queue=0&offset=0",
    "/message?topic=orders&broker=broker-a&queue=0&offset=1",
    "/dead-letters/group?name=billing",
    "/settings?all=1",
    "/topics?system=1",
)


JOIN_S = 60.0
"""For three brokers to stop on a busy machine."""


class ConsoleCluster(NamedTuple):
    """A cluster with something on every page, the address of its console, and what calls them."""

    cluster: LocalCluster
    address: str
    call: Callable[..., Any]


@asynccontextmanager
async def console_beside_cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, str]]:
    """Run three brokers, their clients, and a console that allows changes."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    config.graceful_timeout = 0.5
    settings = ConsoleSettings(allow_changes=True)
    async with (
        local_cluster(folder, settings=SETTINGS) as cluster,
        filled(cluster.namesrv_address),
        trio.open_nursery() as nursery,
    ):
        address = await nursery.start(partial(serve, cluster.namesrv_address, settings, config, ()))
        yield cluster, address
        nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleCluster]:
    """Return a cluster with a console."""
    beside = console_beside_cluster(tmp_path_factory.mktemp("console") / "cluster")
    with LoopThread(beside, "cluster", JOIN_S) as loop:
        yield ConsoleCluster(*loop.opened, loop.call)


@pytest.fixture
def page(served: ConsoleCluster, look: Looker) -> Page:
    """Return a browser's page at the cluster."""
    page = look(f"{served.address}/cluster", 1280).page
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    return page


def done(page: Page) -> str:
    """Return the sentence about the change that was asked for last."""
    return page.locator("#done").inner_text()


def look_until_healthy(page: Page) -> None:
    """Load a page again while it names a broker that has not answered: it may have been busy."""
    problems = page.locator("#problems")
    for _ in range(LOOKS_MAX):
        if problems.count() == 0:
            return
        page.reload()
    assert problems.count() == 0, problems.inner_text()


@pytest.mark.parametrize("width_px", [1280, 360])
@pytest.mark.parametrize("path", [*(address for address, _ in PAGES), *MORE_PAGES])
def test_every_page_fits_and_complains_of_nothing(
    served: ConsoleCluster, look: Looker, path: str, width_px: int
) -> None:
    seen = look(served.address + path, width_px)
    assert seen.page.locator("h1").inner_text()
    look_until_healthy(seen.page)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width_px
    assert seen.complaints == []
    assert all(address.startswith(served.address) for address in seen.asked_for)


def test_pages_are_reached_by_links(page: Page) -> None:
    for _, name in PAGES:
        page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
        expect(page.locator("nav a[aria-current]")).to_have_text(name)


def test_a_hostile_message_runs_nothing(page: Page, served: ConsoleCluster) -> None:
    page.goto(f"{served.address}/messages")
    form = page.locator("form", has=page.get_by_role("button", name="Search by key"))
    form.locator("[name=topic]").fill("orders")
    form.locator("[name=wanted]").fill(HOSTILE_KEY)
    form.get_by_role("button").click()
    page.locator("#found tbody a").first.click()
    expect(page.locator("#body")).to_have_text(HOSTILE)
    assert page.title() == "Message · dledger"
    assert page.locator("main img").count() == 0
    assert page.locator("main script").count() == 0


def test_the_way_of_a_message_is_shown(page: Page, served: ConsoleCluster) -> None:
    page.goto(f"{served.address}/messages?by=key&topic=orders&wanted=order-7")
    page.locator("#found tbody a").first.click()
    steps = page.locator("#steps")
    for kind in ("sent", "stored", "delivered", "dead"):
        expect(steps.locator(".tag", has_text=kind).first).to_be_visible()
    message_id = page.locator("#message-id").inner_text()
    page.goto(f"{served.address}/messages")
    form = page.locator("form", has=page.get_by_role("button", name="Search by id"))
    form.locator("[name=wanted]").fill(message_id)
    form.locator("[name=topic]").fill("orders")
    form.get_by_role("button").click()
    expect(page.locator("#found h2")).to_contain_text("1 found")


def test_a_topic_is_created_changed_and_deleted(page: Page, served: ConsoleCluster) -> None:
    page.goto(f"{served.address}/topics")
    page.locator("[name=name]").fill("made-here")
    page.locator("[name=queues]").fill("3")
    page.get_by_role("button", name="Create").click()
    assert done(page).startswith("Done: create topic made-here")
    page.locator("[name=retention_hours]").fill("12")
    page.locator("[name=permission]").select_option("4")
    page.get_by_role("button", name="Change", exact=True).click()
    assert done(page).startswith("Done: change topic made-here")
    expect(page.locator("main")).to_contain_text("retention.ms = 43200000")
    expect(page.locator("section").first).to_contain_text("read only")
    page.locator("[name=again]").fill("another")
    page.get_by_role("button", name="Delete the topic").click()
    assert "nothing was deleted" in done(page)
    page.goto(f"{served.address}/topic?name=made-here")
    page.locator("[name=again]").fill("made-here")
    page.get_by_role("button", name="Delete the topic").click()
    assert done(page).startswith("Done: delete topic made-here")
    page.goto(f"{served.address}/topics?q=made-here")
    expect(page.locator("main")).to_contain_text("No topic")


def test_a_stuck_group_is_found_and_moved(page: Page, served: ConsoleCluster) -> None:
    page.goto(f"{served.address}/groups")
    expect(page.locator("tr", has_text="reports")).to_contain_text("messages wait, no member")
    page.get_by_role("link", name="reports").click()
    expect(page.locator("#behind")).to_contain_text("the oldest unread message")
    page.locator("[name=topic]").select_option("orders")
    page.locator("[name=to]").select_option("last")
    page.get_by_role("button", name="Show what would change").click()
    expect(page.locator("main")).to_contain_text("Nothing has been changed yet")
    expect(page.locator("main")).to_contain_text("skips")
    page.get_by_role("button", name="Move the group").click()
    assert done(page).startswith("Done: move group reports in orders to last")
    expect(page.locator("#lag")).to_have_text("0")


def test_dead_letters_are_given_back(page: Page, served: ConsoleCluster) -> None:
    page.goto(f"{served.address}/dead-letters")
    page.get_by_role("link", name="billing").click()
    page.locator("[name=letter_1]").check()
    page.get_by_role("button", name="Give the ticked ones back").click()
    assert "1 given back" in done(page)
    page.get_by_role("button", name="Give all of them back").click()
    assert done(page).startswith("Done: give all new dead letters back to billing")


def test_the_cluster_moves_without_a_reload(page: Page) -> None:
    expect(page.locator("#live")).to_have_attribute("data-looks", re.compile(r"[2-9]|\d\d"))
    expect(page.locator("#live")).to_contain_text("healthy")


def test_the_cluster_is_shown_without_scripts(browser: Browser, served: ConsoleCluster) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{served.address}/cluster")
    expect(page.locator("tr[data-member]")).to_have_count(3)
    made = page.locator("footer").inner_text()
    expect(page.locator("footer")).not_to_have_text(made, timeout=WAIT_MS)
    context.close()


def test_leadership_is_moved(page: Page, served: ConsoleCluster) -> None:
    page.get_by_text("Move the leadership").click()
    chosen = page.locator("[name=member]").input_value()
    page.get_by_role("button", name="Move it").click()
    assert done(page).startswith(f"Done: move leadership of broker-a to {chosen}")
    row = page.locator(f"tr[data-member={chosen}]")
    expect(row).to_contain_text("leader")


def test_a_leader_killed_while_looking_is_replaced(page: Page, served: ConsoleCluster) -> None:
    leader = served.call(served.cluster.wait_leader)
    expect(page.locator(f"tr[data-member={leader}]")).to_contain_text("leader")
    page.evaluate("window.sameDocument = true")
    served.call(served.cluster.kill, leader)
    try:
        expect(page.locator(f"tr[data-member={leader}]")).to_contain_text("no answer")
        other = page.locator("tr[data-member]", has=page.locator(".tag", has_text="leader"))
        expect(other).to_have_count(1)
        assert other.get_attribute("data-member") != leader
        expect(page.locator("#problems")).to_contain_text("1 of 3 members of broker-a")
        assert page.evaluate("window.sameDocument")
        page.goto(f"{served.address}/message?topic=orders&broker=broker-a&queue=0&offset=1")
        expect(page.locator("#steps")).to_contain_text("stored")
    finally:
        served.call(heal, served.cluster)


def test_a_name_server_down_leaves_the_members(page: Page, served: ConsoleCluster) -> None:
    served.call(served.cluster.kill, served.cluster.namesrv.name)
    try:
        expect(page.locator("#problems")).to_contain_text("no NameServer answers")
        expect(page.locator("tr[data-member]")).to_have_count(3)
        for path, _ in PAGES:
            answer = page.goto(served.address + path)
            assert answer is not None
            assert answer.status == 200, path
    finally:
        served.call(heal, served.cluster)
