"""The page in a real browser."""

import math
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from dash.planted_run import Plan, accuracy, advance, begin, learn, plant
from esper.config.loading import dump_settings
from esper.lab.report import write_report
from esper.runs.events import Event, LifecycleTransition, StepTaken
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.train.results import write_results
from esper.train.settings import TrainSettings
from factories import Loop
from train.results_cases import planted

CHROMIUM = shutil.which("chromium")
expect.set_options(timeout=60_000)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
PLAN = Plan(networks=16, slots=3, steps=12)
VIEWS = ("population", "network", "learning", "compare", "events")
ATTACK = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"
SECONDS = 60
"""Seconds after which something does not come, on a busy machine too."""

pytestmark = [pytest.mark.landing, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium")]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def served(place: Path, port: int) -> Iterator[str]:
    """`esper dash` as a process of its own."""
    words = [sys.executable, "-m", "esper", "dash", str(place), "--no-browser", "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("dashboard: "), line
        yield line.removeprefix("dashboard: ").strip()
    finally:
        process.terminate()
        process.wait(SECONDS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    plant(place / "first", PLAN)
    plant(place / "second", Plan(networks=2, slots=3, steps=4, iterations=3))
    return place


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder, free_port()) as url:
        yield url


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Path]:
    """The run of a model that grew in its owner's loop; its ninth training loss was not finite."""
    loop = Loop("heuristic", run=folder / "alone")
    for number in range(1, 11):
        loop.epoch(lambda loss, number=number: math.nan if number == 9 else loss)
    loop.grower.close()
    yield folder / "alone"
    delete(folder / "alone")


@pytest.fixture
def passing(folder: Path) -> Iterator[Path]:
    """Where a test may put a run, which goes with the test."""
    yield folder / "passing"
    delete(folder / "passing")


@contextmanager
def opened(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """A page that may neither complain nor ask elsewhere."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    yield page
    origin = "/".join(url.split("/")[:3])
    assert [one for one in asked if not one.startswith(f"{origin}/")] == []
    # A server that was stopped on purpose is complained of by the browser itself.
    assert [one for one in complaints if "ERR_" not in one] == []
    context.close()


def delete(run: Path) -> None:
    """At once: a reader of the store may make a file in a folder that is being emptied."""
    shutil.rmtree(run.rename(run.parent.with_name("deleted")))


def tell(writer: RunStore, *events: Event) -> None:
    for event in events:
        writer.emit(event)
    writer.flush()


def lit(page: Page) -> int:
    """How many colours a canvas shows."""
    return page.evaluate(
        """() => { const canvas = document.querySelector('main canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size; }"""
    )


def test_the_population_shows_every_network_and_opens_one_by_keyboard(browser: Browser, address: str):
    with opened(browser, f"{address}#/population?run=first") as page:
        canvas = page.get_by_label("Networks. Arrow keys")
        expect(canvas).to_be_visible()
        expect(page.locator("#chosen")).to_contain_text("Network 0 quad relu")
        assert lit(page) > 10
        canvas.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#chosen")).to_contain_text("Network 1 ctx relu")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Network 1", exact=True)).to_be_visible()
        assert "environment=1" in page.url


def test_the_population_is_filtered_and_sorted_by_the_address(browser: Browser, address: str):
    with opened(browser, f"{address}#/population?run=first&family=vote&sort=score") as page:
        best = {
            family: max(
                (network for network in range(PLAN.networks) if PLAN.family(network) == family),
                key=lambda network: accuracy(network, PLAN.steps - 1),
            )
            for family in ("vote", "ctx")
        }
        expect(page.locator("#chosen")).to_contain_text(f"Network {best['vote']} vote")
        page.get_by_label("Family").select_option("ctx")
        expect(page.locator("#chosen")).to_contain_text(f"Network {best['ctx']} ctx")
        assert "family=ctx" in page.url


def test_a_network_shows_its_seeds_and_the_policy_s_inputs(browser: Browser, address: str):
    with opened(browser, f"{address}#/network?run=first&environment=1&episode=1&step=3") as page:
        seeds = page.get_by_role("region", name="Seeds by step")
        expect(seeds.get_by_role("row")).to_have_count(1 + PLAN.slots)
        expect(page.get_by_text("70.0%")).to_be_visible()
        for title in ("Accuracy and J", "Loss", "Contributions", "Reward by term", "Rollbacks", "Gate results"):
            expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        expect(page.locator(".uplot")).to_have_count(4)
        page.get_by_label("Step").last.focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_text("step 4: wait")).to_be_visible()
        assert "step=4" in page.url
        expect(page.get_by_role("region", name="Inputs: the network")).to_contain_text("progress")


def test_a_network_shows_how_kept_modules_interact_in_the_probes(browser: Browser, address: str):
    """Network 1 is of family ctx; the first probe instance of that family kept but one module."""
    with opened(browser, f"{address}#/network?run=first&environment=1&episode=1") as page:
        matrix = page.get_by_role("region", name="Interactions of kept modules")
        panel = page.get_by_role("region", name="Kept modules together")
        rows = matrix.get_by_role("row")
        expect(panel).to_contain_text("greedy policy after iteration 1")
        expect(rows).to_have_count(1 + 3)
        expect(rows.nth(0)).to_have_text(re.compile(r"layer0\s*layer1\s*layer2\s*Shapley value"))
        expect(rows.nth(1)).to_have_text(re.compile(r"layer0\s*.+·\s*\u22120\.050\s*0\.000\s*\+0\.100"))
        expect(rows.nth(2)).to_have_text(re.compile(r"layer1\s*.+\u22120\.050\s*·\s*\+0\.050\s*\+0\.080"))
        page.get_by_label("Probe instance").select_option("1")
        expect(rows).to_have_count(1 + 1)
        expect(panel).to_contain_text("A single module has no interactions")
        assert "probe=1" in page.url
        page.get_by_label("Probe instance").select_option("0")
        expect(panel).to_contain_text("The policy kept no modules in this network")
        page.get_by_role("button", name="Next episode").click()
        expect(panel).to_contain_text("greedy policy after iteration 2")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_matrix_of_many_slots_can_be_read_on_a_telephone(browser: Browser, tmp_path: Path, theme: str):
    plant(tmp_path / "wide", Plan(networks=1, slots=4, steps=4))
    with (
        served(tmp_path, free_port()) as url,
        opened(
            browser, f"{url}#/network?run=wide&probe=4", viewport={"width": 400, "height": 800}, color_scheme=theme
        ) as page,
    ):
        matrix = page.get_by_role("region", name="Interactions of kept modules")
        expect(matrix.get_by_role("row")).to_have_count(1 + 4)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        # Numbers stand in one line and can be read.
        numbers = matrix.locator("td.pair, td.alone")
        for cell in numbers.all():
            assert cell.evaluate("cell => cell.getBoundingClientRect().height") < 60
        assert numbers.first.evaluate("cell => parseFloat(getComputedStyle(cell).fontSize)") >= 12


def test_new_probes_show_by_themselves_and_old_runs_say_why_there_are_none(
    browser: Browser, address: str, passing: Path
):
    plan = Plan(networks=2, slots=2, steps=6, iterations=1, ended=False)
    store = plant(passing, plan)
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("DELETE FROM events WHERE type = 'interactions_measured'")
    with opened(browser, f"{address}#/network?run=passing") as page:
        panel = page.get_by_role("region", name="Kept modules together")
        expect(panel).to_contain_text("this run predates the recording of interactions")
        with RunStore.open(store) as writer:
            tell(writer, *begin(plan, 2), *advance(plan, 2, 0))
            learn(writer, plan, 2)
            writer.flush()
            expect(panel).to_contain_text("greedy policy after iteration 2")
            writer.rewind(0)
            tell(writer, *begin(plan, 1), *advance(plan, 1, 0))
            expect(panel).to_contain_text("there was no probe of the greedy policy up to this episode")


def test_learning_shows_scores_health_and_anomalies(browser: Browser, address: str):
    with opened(browser, f"{address}#/learning?run=first") as page:
        expect(page.get_by_role("img", name=re.compile(r"Score\. Newest: .*J, exploring 0.57"))).to_be_visible()
        for title in ("Approximate KL divergence", "Explained variance", "Entropy per head", "Gradient norm"):
            expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        row = page.get_by_role("region", name="Anomalies").get_by_role("row").last
        for text in ("entropy", "slot", "head entropy/slot", "0.001", "0.02", "update undone, learning rate halved"):
            expect(row).to_contain_text(text)


def test_runs_are_compared_as_chosen(browser: Browser, address: str):
    with opened(browser, f"{address}#/compare?run=first") as page:
        rows = page.get_by_role("region", name="Final level of J in each run").get_by_role("row")
        expect(rows).to_have_count(3)
        page.get_by_role("checkbox", name="second").uncheck()
        expect(rows).to_have_count(2)
        assert "with=first" in page.url


def test_an_evaluation_is_shown_with_its_verdicts_or_with_what_writes_them(
    browser: Browser, address: str, passing: Path
):
    run = RunDirectory(passing)
    plant(run.path, PLAN)
    dump_settings(TrainSettings(), run.config)
    write_results(run.evaluation, planted({"policy": 0.7, "untrained": 0.4, "none": 0.5}))
    with opened(browser, f"{address}#/compare?run=passing&with=passing") as page:
        expect(page.get_by_text(re.compile(r"verdicts\.json .*`esper report .*passing`"))).to_be_visible()
        write_report(run)
        page.reload()
        table = page.get_by_role("region", name="passing: policy on 60 held-out instances").first
        expect(table).to_contain_text("policy better")
        expect(page.get_by_text(re.compile(r"^Yes\. One training seed on 60 instances"))).to_be_visible()


def test_the_log_filters_and_pages(browser: Browser, address: str):
    with opened(browser, f"{address}#/events?run=first") as page:
        page.get_by_label("All events").check()
        expect(page.locator(".log .kind").first).to_have_text("run ended")
        expect(page.locator(".log li")).to_have_count(100)
        page.get_by_role("button", name="Older").click()
        expect(page.get_by_role("button", name="Newest")).to_be_visible()
        page.get_by_label("Type").select_option("rolled_back")
        expect(page.locator(".log li")).to_have_count(PLAN.iterations)
        page.locator(".log summary").first.click()
        expect(page.locator(".log pre").first).to_contain_text('"loss_before": 5')
        page.get_by_label("Text").fill("nothing is like this")
        expect(page.get_by_text("No matching events yet")).to_be_visible()


def test_the_log_opens_on_what_matters(browser: Browser, address: str, passing: Path):
    plant(passing, Plan(networks=2, slots=3, steps=12, iterations=1))
    with opened(browser, f"{address}#/events?run=passing") as page:
        kinds = page.locator(".log .kind")
        # All seeds of both networks germinate, those of two slots are kept; a rollback and an anomaly.
        expect(kinds).to_have_count(2 * (3 + 2) + 1 + 1)
        assert set(kinds.all_text_contents()) == {"germinated", "kept", "rolled back", "anomaly raised"}
        kept = page.locator(".log li", has_text="kept").first
        expect(kept).to_contain_text(re.compile(r"in layer1, contribution \+0\.02, minimum \+0\.015, rent 0\.01"))
        page.get_by_label("All events").check()
        expect(kinds.filter(has_text="episode ended").first).to_be_visible()
        assert "all=1" in page.url
        page.get_by_label("All events").uncheck()
        expect(kinds).to_have_count(2 * (3 + 2) + 1 + 1)


def test_runs_are_listed_sorted_and_filtered_by_the_address(browser: Browser, address: str, alone: Path):
    with opened(browser, address) as page:
        names = page.locator(".runs tbody td:first-child")
        expect(names).to_have_text(["alone", "second", "first"])  # the newest first
        page.get_by_role("button", name="Newest").click()
        with RunReader.open(alone / "run.db") as reader:
            accuracy = reader.events(StepTaken)[-1].metric
        levels = {"first": 0.57, "second": 0.58, "alone": accuracy}
        ranked = sorted(levels, key=lambda name: levels[name])
        expect(names).to_have_text(ranked)
        page.get_by_role("button", name="Newest").click()
        expect(names).to_have_text(ranked[::-1])
        expect(page.locator("th[aria-sort=descending]")).to_have_text("Newest")
        page.get_by_label("Filter").fill("TOKENS 0.58")
        expect(names).to_have_text(["second"])
        expect(page.get_by_text("1 of 3 runs")).to_be_visible()
        page.reload()
        expect(names).to_have_text(["second"])
        names.get_by_role("link").click()
        expect(page.get_by_role("heading", name="Population")).to_be_visible()
        page.get_by_role("link", name="All runs").click()
        expect(names).to_have_count(3)
        page.get_by_label("Filter").fill("nothing is like this")
        expect(page.get_by_text("No run matches the filter")).to_be_visible()


def test_new_runs_appear_in_the_list_and_broken_ones_say_why(browser: Browser, address: str, passing: Path):
    with opened(browser, f"{address}#/runs") as page:
        rows = page.locator(".runs tbody tr")
        expect(rows.first).to_be_visible()
        store = plant(passing, Plan(networks=1, slots=1, steps=2, iterations=1))
        expect(rows.first).to_contain_text("passing")
        store.write_text("no store")
        expect(page.locator(".runs tr", has_text="passing")).to_contain_text("run.db")


def test_a_single_run_is_opened_at_once(browser: Browser, folder: Path):
    with served(folder / "second", free_port()) as url, opened(browser, url) as page:
        expect(page.get_by_role("heading", name="Population")).to_be_visible()
        page.get_by_role("link", name="All runs").click()
        expect(page.locator(".runs tbody tr")).to_have_count(1)


def test_curves_are_smoothed_in_front_of_what_was_measured(browser: Browser, address: str):
    with opened(browser, f"{address}#/learning?run=second") as page:
        score = page.get_by_role("region", name="Score")
        expect(score.locator(".legend")).to_have_text(re.compile(r"greedy policy0\.6J, exploring0\.58$"))
        slider = page.get_by_label("Smoothing")
        slider.fill("0.5")
        # (0.56 / 8 + 0.57 / 4 + 0.58 / 2) / (1 - 1 / 8), with the average corrected for its start
        expect(score.locator(".legend")).to_contain_text("J, exploring0.58 (smoothed 0.5743)")
        assert "smooth=0.5" in page.url
        page.get_by_role("link", name="Compare").click()
        expect(page.get_by_label("Smoothing")).to_have_value("0.5")
        expect(page.locator(".legend").first).to_contain_text("smoothed")
        page.get_by_label("Smoothing").fill("0")
        expect(page.locator(".legend").first).not_to_contain_text("smoothed")


@pytest.mark.parametrize("place", ["runs", *(f"{view}?run=first" for view in VIEWS), "model?run=alone"])
def test_a_telephone_shows_the_header_in_two_rows_and_nothing_wider_or_in_front_of_the_cards(
    browser: Browser, address: str, alone: Path, place: str
):
    with opened(browser, f"{address}#/{place}", viewport={"width": 400, "height": 800}) as page:
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.wait_for_function("document.querySelector('main canvas, .log li, .runs td')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        rows = page.evaluate(
            """() => new Set([...document.querySelectorAll('header .top > *, nav a')]
            .filter((one) => one.offsetHeight).map((one) => {
                const box = one.getBoundingClientRect(); return Math.round((box.top + box.bottom) / 2 / 12); })).size"""
        )
        assert rows <= 2
        fixed = """() => [...document.querySelectorAll('body *')]
            .filter((one) => ['fixed', 'sticky'].includes(getComputedStyle(one).position)
                && !one.closest('.scroll, .tall')).length"""
        assert page.evaluate(fixed) == 0


def test_both_themes_are_the_systems_until_the_reader_chooses(browser: Browser, address: str):
    def paper(page: Page) -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with opened(browser, f"{address}#/learning?run=first", color_scheme="dark") as page:
        dark = paper(page)
        page.get_by_role("button", name="Use light colours").click()
        light = paper(page)
        assert light != dark
        page.reload()
        expect(page.get_by_role("button", name="Use dark colours")).to_be_visible()
        assert paper(page) == light
    with opened(browser, f"{address}#/learning?run=first", color_scheme="light") as page:
        assert paper(page) == light


def test_new_events_show_by_themselves(browser: Browser, address: str, passing: Path):
    plan = Plan(networks=2, slots=2, steps=6, iterations=1, ended=False)
    store = plant(passing, plan)
    with opened(browser, f"{address}#/population?run=passing") as page:
        expect(page.locator("#chosen")).to_contain_text("step 5")
        with RunStore.open(store) as writer:
            tell(writer, *begin(plan, 2))
            expect(page.get_by_text("Episode 2 of 2")).to_be_visible()
            for step in range(3):
                tell(writer, *advance(plan, 2, step))
                expect(page.locator("#chosen")).to_contain_text(f"step {step}")
            writer.rewind(1)
            expect(page.get_by_text("Episode 1", exact=True)).to_be_visible()


@pytest.mark.slow
def test_the_page_outlives_the_server_and_the_run(browser: Browser, tmp_path: Path):
    port = free_port()
    runs = tmp_path / "runs"
    runs.mkdir()
    with served(runs, port) as url:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(1000 * SECONDS)
        page.goto(url)
        expect(page.get_by_text("There are no runs in")).to_be_visible()
        store = plant(runs / "late", Plan(networks=2, slots=1, steps=4, iterations=1, ended=False))
        expect(page.locator("#chosen")).to_contain_text("Network 0")
    expect(page.locator("#status")).to_contain_text("connection lost")
    with RunStore.open(store) as writer:
        tell(writer, *begin(PLAN, 2), *advance(PLAN, 2, 0))
    with served(runs, port):
        expect(page.get_by_text("Episode 2 of 2")).to_be_visible(timeout=1000 * SECONDS)
        plant(runs / "other", Plan(networks=2, slots=1, steps=4, iterations=1))  # so that there is a page to complain
        delete(store.parent)
        expect(page.locator("#trouble")).to_contain_text("no run")
        plant(store.parent, Plan(networks=2, slots=1, steps=4, iterations=1))
        expect(page.locator("#trouble")).to_be_hidden(timeout=1000 * SECONDS)
        expect(page.get_by_text("Episode 1", exact=True)).to_be_visible(timeout=1000 * SECONDS)
    context.close()


def test_a_complaint_ends_with_the_next_connection_that_works(browser: Browser, address: str, passing: Path):
    """Also where the run comes back while the page still awaits what it asked for before the run went."""
    plan = Plan(networks=2, slots=1, steps=4, iterations=1, ended=False)
    store = plant(passing, plan)
    with opened(browser, f"{address}#/population?run=passing") as page:
        expect(page.get_by_text("Episode 1", exact=True)).to_be_visible()
        page.route("**/api/population?*", lambda _: None)
        with page.expect_request("**/api/population?*"), RunStore.open(store) as writer:
            tell(writer, *begin(plan, 2))
        delete(store.parent)
        expect(page.locator("#trouble")).to_contain_text("no run")
        plant(store.parent, plan)
        page.unroute("**/api/population?*")  # which lets those go on that are held
        expect(page.locator("#trouble")).to_be_hidden()
        expect(page.get_by_text("Episode 1", exact=True)).to_be_visible()


@pytest.mark.slow
def test_no_content_of_a_run_becomes_markup(browser: Browser, address: str, folder: Path):
    name = "<b onclick=x>run"
    attacked = Plan(networks=2, slots=2, steps=4, families=(ATTACK, ATTACK + "2"), blueprints=(ATTACK,), reason=ATTACK)
    plant(folder / name, attacked)
    with RunStore.open(plant(folder / "attacked", attacked)) as writer:
        writer.set_metadata({"command": "grow", "host": ATTACK})
    with opened(browser, f"{address}#/population?run=first") as page:
        for view in VIEWS:
            page.goto(f"{address}#/{view}?run=%3Cb%20onclick%3Dx%3Erun&environment=1")
            expect(page.get_by_role("heading", level=1)).to_contain_text(view[:5], ignore_case=True)
            page.wait_for_function("document.querySelector('main canvas, .log li')")
            expect(page.locator("main img, main script, main b[onclick], select img")).to_have_count(0)
            expect(page.locator("#run")).to_have_value(name)
            assert page.title() == "Esper"
        page.goto(f"{address}#/network?run=%3Cb%20onclick%3Dx%3Erun&environment=1")
        expect(page.get_by_text(ATTACK).first).to_be_visible()
        page.goto(f"{address}#/model?run=attacked")
        expect(page.get_by_role("heading", level=1)).to_have_text(ATTACK)
        page.wait_for_function("document.querySelector('main canvas')")
        expect(page.locator("main img, main script, main b[onclick], select img")).to_have_count(0)
        assert page.title() == "Esper"
    delete(folder / name)
    delete(folder / "attacked")


def test_a_model_s_page_says_why_seeds_were_pruned(browser: Browser, address: str, passing: Path):
    loop = Loop("all_at_start", run=passing, rent=9.0)  # nothing is worth that
    for _ in range(4):
        loop.epoch()
    loop.grower.finish()
    with RunReader.open(passing / "run.db") as reader:
        decided = [change for change in reader.events(LifecycleTransition) if change.threshold is not None]
    assert len(decided) == 2
    with opened(browser, f"{address}#/model?run=passing") as page:
        seeds = page.get_by_role("region", name="Seeds by decision")
        expect(seeds.locator("thead")).to_contain_text("Minimum")
        newest = page.locator(".tall tbody tr").first
        for change, row in zip(decided, seeds.locator("tbody tr").all(), strict=True):
            assert change.price == change.threshold
            expect(row).to_contain_text(f"{change.price:.3f}")
            expect(row).to_contain_text(f"+{change.threshold:.3f}")
            figures = rf"{change.before} to pruned \(finish\): contribution .*, rent {change.price:.3f}, minimum"
            expect(newest).to_contain_text(re.compile(figures))


def test_a_model_that_grew_alone_has_a_page_of_its_own(browser: Browser, address: str, alone: Path):
    with RunReader.open(alone / "run.db") as reader:
        steps, seeds = reader.events(StepTaken), reader.rows("SELECT blueprint FROM seeds")
        last, slots = steps[-1], reader.metadata()["slots"]
        added = reader.scalars_at(last.iteration)["added_parameters"]
    with opened(browser, f"{address}#/population?run=alone") as page:  # which such a run has none of
        expect(page.get_by_role("heading", level=1)).to_have_text("Sequential")
        assert page.url.endswith("#/model?run=alone")
        assert page.locator("nav a").all_text_contents() == ["All runs", "Model", "Compare", "Events"]
        expect(page.locator("#status")).to_have_text("finished, decision 10 of 20")
        expect(page.locator("main")).to_contain_text(
            f"After decision 10: accuracy {last.metric:.3f}, loss {last.loss:.3f}"
        )
        expect(page.locator("main")).to_contain_text(f"and {added:.0f} in seeds")
        for title in ("Accuracy", "Loss", "Contributions", "Parameters"):
            expect(page.get_by_role("img", name=re.compile(rf"^{title}\. Newest: (?!nothing)"))).to_be_visible()
        assert lit(page) > 10
        expect(page.get_by_role("region", name="Seeds by decision").locator("tbody tr")).to_have_count(len(seeds))
        rows = page.locator(".tall tbody tr")
        expect(rows).to_have_count(len(steps))
        for row, step in zip(rows.all(), reversed(steps), strict=True):
            what = f"{step.op} {step.blueprint} in {slots[step.slot or 0]}" if step.blueprint else step.op
            expect(row.locator("td").nth(1)).to_contain_text(what)
            expect(row.locator("td").last).to_have_text(f"{step.metric:.3f}")
        expect(rows.nth(1)).to_contain_text("rolled back: not finite")
        expect(page.get_by_text("held back, alpha moving").first).to_be_attached()
        expect(page.get_by_role("region", name="Rollbacks").last.locator("tbody tr")).to_have_count(1)
        page.locator("#run").select_option("first")
        expect(page.get_by_role("heading", name="Population")).to_be_visible()
        page.locator("#run").select_option("alone")
        expect(page.get_by_role("heading", name="Sequential")).to_be_visible()


def test_the_page_of_a_model_follows_its_training(browser: Browser, address: str, passing: Path):
    loop = Loop("heuristic", run=passing)
    with opened(browser, f"{address}#/model?run=passing") as page:
        expect(page.get_by_text("No decisions yet")).to_be_visible()
        for number in range(1, 4):
            loop.epoch()
            expect(page.get_by_text(f"After decision {number}:")).to_be_visible()
    loop.grower.close()


def test_every_view_is_reached_with_the_tab_key(browser: Browser, address: str):
    with opened(browser, f"{address}#/events?run=first") as page:
        expect(page.locator(".log li").first).to_be_visible()
        seen: list[str] = []
        for _ in range(12):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.textContent.trim()"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        for view in VIEWS:
            assert view.capitalize() in seen


@pytest.mark.slow
def test_the_server_ends_cleanly_with_a_browser_still_there(browser: Browser, tmp_path: Path):
    plant(tmp_path / "run", Plan(networks=1, slots=1, steps=2, iterations=1))
    words = [sys.executable, "-m", "esper", "dash", str(tmp_path), "--no-browser", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = process.stdout.readline().removeprefix("dashboard: ").strip()
    page = browser.new_page()
    page.goto(f"{url}#/events?run=run")
    expect(page.locator(".log li").first).to_be_visible()
    time.sleep(0.3)  # for the stream to open
    process.send_signal(2)
    _, complaints = process.communicate(timeout=SECONDS)
    assert (process.returncode, complaints) == (0, "")
    page.close()
