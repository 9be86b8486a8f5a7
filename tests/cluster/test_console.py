"""The console as an operator meets it: every page and action, both themes, desktop and phone, each scope.

Method: one real server with keys, and one page in headless Chromium for all tests. The page must not complain
of anything but what it was refused for its key. Nothing is timed; the live tail is counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from streams.testing import running_server
from tests.support import axe
from tests.support.browser import Page, page
from tests.support.console_data import ADDRESSES, fill
from tests.support.crashing import eventually

WHOLE, READER, CONFINED = (
    "the-whole-secret-0123456789",
    "the-reader-secret-0123456789",
    "the-confined-secret-0123456789",
)
#: A server may well need 1.0 ms. JSON of the page keeps such a number as it is written.
_ROUND_TIMES = r"""(() => { const real = fetch; window.fetch = async (...all) => {
  const answer = await real(...all);
  const text = (await answer.text()).replace(/"server_total_ms":[\d.]+/, '"server_total_ms":1.0');
  return new Response(text, { status: answer.status, headers: answer.headers }); }; return null; })()"""
MARKUP = "<img src=x onerror=document.title='run'>"


class Site(NamedTuple):
    url: str
    client: httpx2.Client
    console: Page

    def open(self, address: str) -> None:
        """Goes to a page of the console and waits until it is drawn and has its data."""
        self.console.run(f"document.activeElement?.blur(); location.hash = {json.dumps(address)}; null")
        self.console.until(
            "document.querySelector('main')?.dataset.at === location.hash"
            " && document.querySelector('main h1') && !document.body.innerText.includes('Loading …')"
        )

    def use_key(self, key: str) -> None:
        """Starts the console with a key, which is stored before the console loads.

        A page that loads again still shows words of the old one, and loses an address that is set then.
        """
        self.console.go(f"{self.url}/console/licenses.txt")
        self.console.run(f"sessionStorage.setItem('streams.key', {json.dumps(key)})")
        self.console.go(f"{self.url}/")
        self.console.wait_for("Forget key")

    def press_button(self, words: str) -> None:
        """Clicks the first button of the page that begins with these words."""
        starts = f"e.textContent.startsWith({json.dumps(words)})"
        found = f"[...document.querySelectorAll('main button')].find((e) => {starts})"
        self.console.until(f"Boolean({found})")
        self.console.run(f"{found}.click()")

    def confirm(self, name: str) -> None:
        """Types the name that a dialog asks for, and confirms."""
        self.console.until("Boolean(document.querySelector('#confirm-name'))")
        assert self.console.run("document.querySelector('dialog button.danger').disabled")
        self.console.type("#confirm-name", name)
        self.console.until("!document.querySelector('dialog button.danger').disabled")
        self.console.click("dialog button.danger")
        self.console.until("!document.querySelector('dialog')")

    def append(self, box: str, *data: object) -> None:
        records = [{"data": each} for each in data]
        assert self.client.post(f"/v0/boxes/{box}", json={"records": records}).status_code in (200, 201)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    keys = f"{WHOLE},{READER}:r,{CONFINED}:rw:mine."
    with (
        running_server(shards=1, api_keys=keys) as server,
        httpx2.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        page(tmp_path_factory.mktemp("chromium")) as console,
    ):
        client.headers["Authorization"] = f"Bearer {WHOLE}"
        fill(client)
        yield Site(server.url, client, console)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    shared.console.use_screen(1280, 900)
    shared.console.use_theme("light")
    shared.console.complaints.clear()
    yield shared
    complaints = [json.loads(each) for each in shared.console.complaints]
    assert [each for each in complaints if each.get("source") != "network"] == []


def test_a_person_with_a_key_follows_a_box_and_writes_to_it(site: Site) -> None:
    """§13"""
    console = site.console
    for box in ("mine.log", "others"):
        site.append(box, {"n": 1, "text": MARKUP})
    console.go(f"{site.url}/")
    console.wait_for("This server asks for a key")
    console.type("#key", WHOLE)
    console.click("#ask button")
    console.wait_for("Shards", "Gateways", "Forget key", "Event loop lag of shards")
    assert console.run("Object.keys(localStorage).length + document.cookie.length") == 0
    assert WHOLE not in console.run("location.href + document.documentElement.outerHTML")

    site.open("#/boxes/mine.log/live")
    console.wait_for("live", MARKUP)
    site.append("mine.log", "written by another")
    console.wait_for("written by another")
    site.open("#/boxes/mine.log/produce")
    console.type("textarea", '{"big": 12345678901234567890, "one": 1.0}')
    console.type("input[name=tag]", "<b>mine</b>")
    console.click("main form button[type=submit]")
    console.wait_for("Written as 3")
    site.open("#/boxes/mine.log/records")
    console.wait_for('{"big":12345678901234567890,"one":1.0}', "<b>mine</b>", MARKUP)
    assert console.run("document.title") == "mine.log · records · streams", "markup of a record was run"

    console.click("#forget")
    console.wait_for("This server asks for a key")
    console.type("#key", CONFINED)
    console.click("#ask button")
    site.open("#/")
    console.wait_for("This key is for some boxes only")
    site.open("#/boxes")
    console.wait_for("mine.log")
    assert "others" not in console.text


def test_every_page_is_accessible_in_both_themes_and_fits_a_phone(site: Site) -> None:
    site.use_key(WHOLE)
    wrong: list[str] = []
    for name, address in ADDRESSES.items():
        site.console.use_screen(1280, 900)
        site.console.use_theme("light")
        site.open(address)
        wrong += [f"{name}, light: {each}" for each in axe.findings(site.console)]
        site.console.use_theme("dark")
        site.console.until("document.documentElement.dataset.theme === 'dark'")
        wrong += [f"{name}, dark: {each}" for each in axe.findings(site.console, "color-contrast")]
        site.console.use_screen(390, 844, is_phone=True)
        if site.console.run("document.documentElement.scrollWidth > innerWidth"):
            wrong.append(f"{name} is wider than a phone")
    assert not wrong, "\n".join(wrong)


def test_a_key_that_only_reads_is_offered_nothing_else(site: Site) -> None:
    site.use_key(READER)
    site.open("#/boxes/orders/settings")
    assert "Produce" not in site.console.text and "Delete box" not in site.console.text
    assert (
        site.console.run("document.querySelectorAll('main input:enabled, main select:enabled').length") == 0
    )
    site.open("#/boxes")
    assert "New box" not in site.console.text
    site.open("#/routers")
    assert "New router" not in site.console.text and "Delete …" not in site.console.text
    site.open("#/boxes/emails/dead")
    site.console.wait_for("1 delivery")
    assert "Requeue" not in site.console.text


def test_looking_changes_nothing(site: Site) -> None:
    """§25"""
    site.append("seen", 1, 2)
    site.use_key(WHOLE)
    for tab in ("records", "live", "groups", "routers", "settings"):
        site.open(f"#/boxes/seen/{tab}")
        site.console.wait_for("seen")
    assert site.client.get("/v0/boxes/seen", params={"touch": "false"}).json()["last_read_ts"] is None


def test_a_box_is_created_written_to_configured_and_deleted_by_name(site: Site) -> None:
    site.use_key(WHOLE)
    console = site.console
    site.open("#/boxes")
    console.run("document.querySelector('.create').open = true; null")
    console.type(".create input", "made.here")
    console.click(".create button[type=submit]")
    console.wait_for("made.here", "Sent from here")
    console.type("textarea", "{not json")
    console.wait_for("This is not JSON")
    assert console.run("document.querySelector('main form button[type=submit]').disabled")
    console.run("document.querySelector('main input[type=checkbox]').click(); null")
    console.type("textarea", '{"a": 1}\n{"a": 2}')
    console.wait_for("2 records, all valid")
    console.run(_ROUND_TIMES)
    console.click("main form button[type=submit]")
    console.wait_for("1 – 2")
    site.open("#/boxes/made.here/settings")
    console.type("input[name=cap_records]", "7")
    console.click("main form button[type=submit]")
    console.wait_for("Saved.", '"cap_records": 7')
    console.click("#delete-box")
    console.wait_for("It cannot be undone")
    assert console.run("document.querySelector('dialog button.danger').disabled")
    console.type("#confirm-name", "made.here")
    console.until("!document.querySelector('dialog button.danger').disabled")
    console.click("dialog button.danger")
    console.until("location.hash === '#/boxes'")
    assert site.client.get("/v0/boxes/made.here").status_code == 404


def test_records_are_reached_from_the_first_to_the_last_by_seq_and_by_page(site: Site) -> None:
    site.use_key(WHOLE)
    console = site.console
    first = "Number(document.querySelector('.record')?.dataset.seq)"
    site.open("#/boxes/orders/records?from=0")
    console.until(f"{first} === 1")
    console.press("]")
    console.until(f"{first} === 51")
    console.press("[")
    console.until(f"{first} === 1")
    site.open("#/boxes/orders/records?from=499&open=500")
    console.wait_for("Copy as curl", "Copy and edit")
    assert console.run("document.querySelector('.record.open').dataset.seq") == "500"
    site.open("#/boxes/orders/records?from=0&tag=user-7")
    tags = "[...new Set([...document.querySelectorAll('.record .tag')].map((e) => e.textContent))]"
    console.until(f"{tags}.join() === 'user-7'")
    site.open("#/boxes/clicks/records?from=0")
    console.wait_for("are gone")


def test_records_are_searched_by_text_and_field_and_copied_with_all_their_digits(site: Site) -> None:
    """The server filters tags, the page looks for the rest, and says how many records it looked at."""
    site.use_key(WHOLE)
    console = site.console
    site.append("numbers", *({"n": at, "big": 12345678901234567890} for at in range(3000)))
    shown = "[...document.querySelectorAll('.record')].map((e) => Number(e.dataset.seq))"
    site.open("#/boxes/numbers/records?contains=n%20>%202990&fields=n,big")
    console.wait_for("9 match of 3,000 looked at", "big 12345678901234567000")
    site.open("#/boxes/numbers/records?from=0&contains=n%20=%201234")
    console.until(f"{shown}.join() === '1235'")
    site.open("#/boxes/numbers/records?contains=%3A7%2C")
    console.until(f"{shown}.join() === '8'")
    site.open("#/boxes/numbers/produce?copy=8")
    console.until("document.querySelector('textarea').value.includes('12345678901234567890')")
    site.press_button("Format")
    console.click("main form button[type=submit]")
    console.wait_for("Written as 3001")
    assert site.client.get("/v0/boxes/numbers/records/3001").text.count("12345678901234567890") == 1


def test_a_schedule_is_created_run_paused_changed_and_deleted(site: Site) -> None:
    """§22"""
    site.use_key(WHOLE)
    console = site.console
    assert site.client.put("/v0/boxes/ticks", json={}).status_code == 201
    site.open("#/schedules")
    console.wait_for("nightly-digest", "Europe/Berlin")
    console.click("#new-schedule")
    console.until("Boolean(document.querySelector('#schedule'))")
    for field, value in (("schedule", "hourly"), ("box", "ticks"), ("cron", "@hourly")):
        console.type(f"#schedule input[name={field}]", value)
    console.type("#schedule textarea", '{"exact": 1.0}')
    console.click("#schedule button[type=submit]")
    row = "[...document.querySelectorAll('main tbody tr')].find((e) => e.textContent.startsWith('hourly'))"
    click = f"[...{row}.querySelectorAll('button')].find((e) => e.textContent.startsWith(%r)).click()"
    console.until(f"Boolean({row})")
    console.run(click % "Run now")
    console.wait_for("hourly has run: record 1")
    assert '"exact": 1.0' in site.client.get("/v0/boxes/ticks/records/1").text
    console.run(click % "Pause")
    console.wait_for("hourly is paused.")
    console.until(f"{row}.textContent.includes('paused')")
    console.run(click % "Change")
    console.until("document.querySelector('#schedule textarea')?.value.includes('1.0')")
    console.type("#schedule input[name=cron]", "@daily")
    console.click("#schedule button[type=submit]")
    console.until(f"{row}.textContent.includes('@daily')")
    kept = site.client.get("/v0/schedules/hourly").json()
    assert (kept["cron"], kept["paused"], kept["fired_total"]) == ("@daily", True, 1)
    console.until("!document.querySelector('#schedule')")
    console.run(click % "Delete")
    site.confirm("hourly")
    console.until(f"!{row}")


def test_jobs_wait_while_a_queue_is_paused_and_are_changed(site: Site) -> None:
    """§21, §23"""
    site.use_key(WHOLE)
    console = site.console
    assert site.client.put("/v0/boxes/work", json={"type": "queue"}).status_code == 201
    later = [{"data": 1, "tag": "late", "delay_ms": 600_000}]
    assert site.client.post("/v0/boxes/work", json={"records": later}).status_code == 200
    site.open("#/boxes/emails/jobs")
    console.wait_for("worker-1", "12 jobs", "Lease until")
    site.open("#/boxes/thumbnails/jobs?state=delayed")
    console.wait_for("image is truncated (4 of 812 KiB)", "on resizer-2")
    site.press_button("Due now")
    console.until("document.querySelectorAll('main tbody tr').length === 2")
    site.open("#/boxes/work/jobs")
    console.click("#pause-queue")
    console.wait_for("Resume claims")
    assert site.client.post("/v0/boxes/work/claim", json={"node": "w"}).json()["paused"]
    console.click("#pause-queue")
    console.wait_for("Pause claims")
    console.run("document.querySelector('#change').open = true; null")
    console.type("#change input[name=which]", "late")
    console.click("#change button[type=submit]")
    console.wait_for("1 job changed.")
    assert site.client.post("/v0/boxes/work/claim", json={"node": "w"}).json()["count"] == 1


def test_records_are_counted_before_they_are_deleted(site: Site) -> None:
    site.use_key(WHOLE)
    console = site.console
    tagged = [{"data": at, "tag": f"t{at % 2}"} for at in range(30)]
    assert site.client.post("/v0/boxes/trimmed", json={"records": tagged}).status_code == 201
    site.open("#/boxes/trimmed/settings")
    console.wait_for("Records expire at this age")
    for by, value, words, left in (("seq", "11", "10 records", 20), ("tag", "t1", "10 records", 10)):
        console.run(
            f"{{const e = document.querySelector('.panel.danger select'); e.value = '{by}';"
            "e.dispatchEvent(new Event('change', {bubbles: true}));} null"
        )
        console.type("input[name=delete]", value)
        site.press_button("Count and delete")
        console.wait_for(f"This deletes {words}")
        site.confirm("trimmed")
        console.wait_for("records are deleted.")
        assert site.client.get("/v0/boxes/trimmed").json()["count"] == left


def test_the_live_tail_keeps_counts_and_draws_once_a_frame(site: Site) -> None:
    """A burst of 20,000 records: all are kept or counted as dropped, in a page of bounded size."""
    site.append("burst", 0)
    site.use_key(WHOLE)
    console = site.console
    site.open("#/boxes/burst/live")
    console.until("document.querySelector('#tail')?.dataset.received === '1'")
    nodes = "document.querySelectorAll('*').length"
    before = console.run(nodes)
    for _ in range(4):
        site.append("burst", *range(5000))
    data = "document.querySelector('#tail').dataset"
    console.until(f"{data}.received === '20001'")
    counts = console.run(f"({{...{data}}})")
    assert int(counts["kept"]) + int(counts["dropped"]) == int(counts["received"]) == 20_001
    assert int(counts["layouts"]) <= int(counts["frames"]), "more than one layout in a frame"
    assert console.run(nodes) <= before + 20
    console.press(" ")
    console.until("document.querySelector('#live-state').textContent === 'paused'")
    site.append("burst", "while it was paused")
    console.press(" ")
    console.until(f"{data}.received === '20002'")
    console.wait_for("while it was paused")
    console.run(
        "[...document.querySelectorAll('.tail-row')].find((e) => e.textContent.includes('paused')).click()"
    )
    console.wait_for("Record 20002", "In Records")


def test_the_fullest_queue_is_first_and_dead_letters_are_put_back(site: Site) -> None:
    """§26"""
    for at in range(110):
        assert site.client.put(f"/v0/boxes/many.{at:03d}", json={"type": "queue"}).status_code == 201
    site.append("many.109", *range(900))
    site.use_key(WHOLE)
    console = site.console
    site.open("#/queues")
    console.until("document.querySelector('main tbody a.name')?.textContent === 'many.109'")
    site.open("#/boxes/emails/dead")
    console.wait_for("1 delivery", "550 no such mailbox")
    console.type("main input[data-search]", "to = user2@example.com")
    site.press_button("Requeue 1 shown")
    console.wait_for("1 matching jobs are back in the queue.")
    console.type("main input[data-search]", "")
    console.until("document.querySelectorAll('.record').length === 4")
    console.click(".record-line")
    console.wait_for("Worker", "worker-1")
    site.press_button("Requeue this one")
    console.until("document.querySelectorAll('.record').length === 3")
    console.click(".record-line")
    site.press_button("Delete up to here")
    console.wait_for("This deletes 1 dead letters")
    site.confirm("emails.dead")
    console.until("document.querySelectorAll('.record').length === 2")
    console.run(
        "[...document.querySelectorAll('main button')].find((e) => e.textContent === 'Requeue all').click()"
    )
    console.wait_for("jobs are back in the queue.")
    eventually(lambda: True if "No dead letters" in console.text else None)


def test_cursors_are_moved_and_routers_created_and_deleted(site: Site) -> None:
    site.use_key(WHOLE)
    console = site.console
    click = "[...document.querySelectorAll('main button')].find((e) => e.textContent.startsWith(%r)).click()"
    site.open("#/boxes/orders/groups")
    console.wait_for("billing")
    console.run("document.querySelector('.create').open = true; null")
    console.type("input[name=group]", "fresh")
    console.click(".create button[type=submit]")
    console.until("[...document.querySelectorAll('main tbody td')].some((e) => e.textContent === 'fresh')")
    assert site.client.get("/v0/boxes/orders/groups/fresh").json()["lag"] == 0
    console.run(click % "Move …")
    console.wait_for("To the beginning")
    console.run(click % "To the beginning")
    eventually(lambda: site.client.get("/v0/boxes/orders/groups/billing").json()["cursor"] == 0 or None)
    site.open("#/routers")
    console.run("document.querySelector('.create').open = true; null")
    for field, value in (("router", "new-one"), ("source", "orders"), ("dest", "elsewhere")):
        console.type(f"input[name={field}]", value)
    console.click(".create button[type=submit]")
    console.until(
        "[...document.querySelectorAll('.node text')].some((e) => e.textContent.startsWith('elsewhere'))"
    )
    rows = "[...document.querySelectorAll('main tbody tr')]"
    console.run(f"{rows}.find((e) => e.textContent.startsWith('new-one')).querySelector('button').click()")
    console.wait_for("Delete the router")
    console.type("#confirm-name", "new-one")
    console.until("!document.querySelector('dialog button.danger').disabled")
    console.click("dialog button.danger")
    console.until(f"!{rows}.some((e) => e.textContent.startsWith('new-one'))")


def test_the_keyboard_reaches_pages_and_rows_and_unknown_pages_say_so(site: Site) -> None:
    site.use_key(WHOLE)
    console = site.console
    site.open("#/nope")
    console.wait_for("There is no such page")
    console.press("g")
    console.press("b")
    console.until("location.hash === '#/boxes' && Boolean(document.querySelector('.vrow.item'))")
    console.press("j")
    console.until("document.activeElement.className === 'name'")
    console.run("document.activeElement.blur()")
    console.press("/")
    console.until("document.activeElement.type === 'search'")
    console.press("Escape")
    console.press("?")
    console.wait_for("pause or resume the live tail")


def test_the_explorer_tries_a_call(site: Site) -> None:
    """§13"""
    console = site.console
    site.use_key(WHOLE)
    console.go(f"{site.url}/docs#GET%20%2Fv0%2Fwhoami")
    console.wait_for("/v0/whoami", "/v1/basins", "Send")
    assert axe.findings(console) == []
    console.click("main form button[type=submit]")
    console.wait_for('"scopes"', "200")
    assert console.run("document.querySelector('header a.mark').getAttribute('href')") == "/"


def test_operations_show_storage_keys_and_settings_without_secrets(site: Site) -> None:
    """§31"""
    site.use_key(WHOLE)
    console = site.console
    site.open("#/operations/storage")
    console.wait_for("Log (WAL)", "Cold tier and object chains", "Last backup")
    console.until("Number(document.querySelector('main tbody td:nth-child(5)').textContent) > 0")
    site.open("#/operations/keys")
    console.wait_for("all boxes", "mine.")
    site.open("#/operations/settings?changed=1")
    console.wait_for("STREAMS_API_KEYS", "STREAMS_PORT")
    assert not any(secret in console.text for secret in (WHOLE, READER, CONFINED))
    site.use_key(READER)
    site.open("#/operations/settings")
    assert "Settings" not in console.text and "snapshots" in console.text


def test_any_box_or_page_is_reached_by_a_part_of_its_name(site: Site) -> None:
    site.use_key(WHOLE)
    console = site.console
    site.open("#/groups")
    console.wait_for("billing", "search-index")
    console.press("g")
    console.press("o")
    console.until("location.hash === '#/'")
    console.click("#go-to")
    console.until("document.activeElement.closest('#palette') !== null")
    console.type("#palette input", "thumb")
    console.until("document.querySelectorAll('#palette li').length === 1")
    assert axe.findings(console) == []
    console.run("document.querySelector('#palette form').requestSubmit()")
    console.until("location.hash === '#/boxes/thumbnails/jobs' && !document.querySelector('#palette')")


def test_pages_survive_hostile_names_and_states(site: Site, tmp_path: Path) -> None:
    site.use_key(WHOLE)
    for address in (
        "#/boxes/%E0%A4%A",
        "#/boxes/none/live",
        "#/boxes/orders/records?from=x",
        "#/s2?basin=none-such",
    ):
        site.open(address)
    site.console.wait_for("Streams (S2)")
