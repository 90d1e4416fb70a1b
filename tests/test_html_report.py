"""The report: one file that loads nothing, says what the plan says, and works in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: no report")

from conftest import REPOSITORY

from zeus_hetero import PlanError, allocate
from zeus_hetero.html_report import Subject, page

WAITS = {"A10": 60.0, "T4": 40.0}


@pytest.fixture(scope="module")
def plan(aws):
    return allocate(aws["cifar100"], 4096, wait_power=WAITS, sync_time=0.02)


@pytest.fixture(scope="module")
def text(plan, aws):
    return page(Subject(plan, aws["cifar100"], {}, (("plan", "plan.json"),)))


class Document(HTMLParser):
    """What a page loads, its headings, and the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.headings, self.cells, self.scripts = [], [], [], 0
        self._open = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.loads += [given[name] for name in ("src", "srcset") if given.get(name)]
        if tag == "link":
            self.loads.append(given.get("href"))
        self.scripts += tag == "script"
        self._open = tag

    def handle_data(self, data):
        if self._open in ("h1", "h2", "h3"):
            self.headings.append(data)
        elif self._open in ("td", "th"):
            self.cells.append(data)

    def handle_endtag(self, tag):
        self._open = None


def test_loads_nothing_from_anywhere(text):
    assert Document(text).loads == []
    assert text.startswith("<!doctype html>")


def test_says_what_the_plan_says(text, plan):
    cells = Document(text).cells
    for worker in plan.workers:
        for figure in (worker.gpu, str(worker.batch_size), str(worker.power_limit),
                       f"{worker.accumulation_steps} x {worker.micro_batch_size}",
                       f"{worker.time:.4g}"):  # fmt: skip
            assert figure in cells
    assert "proven optimal" in text
    assert "<strong>34." in text or "<strong>35." in text, "the time saved is not said"


def test_has_every_part(text):
    headings = Document(text).headings
    for part in ("Allocation", "One step", "Methods", "Savings", "Pareto front",
                 "Traces and fits", "A10", "T4", "Why this plan",
                 "Inputs and versions"):  # fmt: skip
        assert part in headings
    for name in ("zeus-hetero", "numpy", "Python", "option eta", "plan.json"):
        assert name in Document(text).cells


def test_plan_alone_says_what_is_missing(plan):
    text = page(Subject(plan))
    assert "These need the traces" in text
    assert "One step" in Document(text).headings
    assert "Savings" not in Document(text).headings


def test_simulated_plans_are_marked(plan, text):
    assert "SIMULATED" not in text
    assert "SIMULATED" in page(Subject(replace(plan, simulated=True)))


def test_names_from_files_cannot_become_code(plan):
    evil = "<script>alert(1)</script>"
    workers = (replace(plan.workers[0], gpu=evil), plan.workers[1])
    text = page(Subject(replace(plan, workers=workers), inputs=(("plan", evil),)))
    assert evil not in text
    assert Document(text).scripts == Document(page(Subject(plan))).scripts


def test_trace_that_is_missing_is_named(plan, aws):
    with pytest.raises(PlanError, match="there is no trace of T4; give one as T4=TRACE"):
        Subject(plan, {"A10": aws["cifar100"]["A10"]})


# -- the command -------------------------------------------------------------------------------


def command(*arguments, folder):
    return subprocess.run(
        [sys.executable, "-m", "zeus_hetero", "report", *map(str, arguments)], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, text=True, capture_output=True,
        timeout=120,
    )  # fmt: skip


def traces():
    folder = REPOSITORY / "trace_aws"
    return [f"A10={folder / 'cifar_a10.json'}", f"T4={folder / 'cifar_t4.json'}"]


def test_command_with_a_plan_with_traces_and_with_both(tmp_path, plan):
    plan.save(tmp_path / "plan.json")
    for arguments, saved in (
        (["plan.json"], False),
        ([*traces(), "--global-batch-size", "256"], True),
        (["plan.json", *traces(), "-o", "both.html"], True),
    ):
        done = command(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        written = tmp_path / re.match(r"wrote (\S+)", done.stdout).group(1)
        assert ("Savings" in Document(written.read_text()).headings) == saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected one plan, or traces"),
        (["missing.json"], "missing.json: no such file"),
        (["one.json", "two.json"], "2 plans"),
        (["A10=missing.json"], "missing.json"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# -- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium and ChromeDriver here (Debian: chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def show(browser, path, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(f"file://{path}")
    from selenium.webdriver.support.ui import WebDriverWait

    drawn = "return document.querySelectorAll('.figure svg.main-svg').length"
    WebDriverWait(browser, 30).until(lambda b: b.execute_script(drawn) >= 5)


@pytest.fixture(scope="module")
def written(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 390], ids=["desktop", "phone"])
def test_browser_draws_every_plot_without_errors_and_overflow(browser, written, width):
    show(browser, written, width)
    points = "return document.querySelectorAll('#trace0 path.point').length"
    assert browser.execute_script(points) >= 30, "the measured points are not drawn"
    bars = "return document.querySelectorAll('#timeline .bars .point path').length"
    assert browser.execute_script(bars) >= 5, "the micro-batches are not drawn"
    overflow = "return document.documentElement.scrollWidth - window.innerWidth"
    assert browser.execute_script(overflow) <= 0, "the page must not scroll sideways"
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


@pytest.mark.slow
def test_slider_moves_the_optimum(browser, written):
    show(browser, written, 1100)
    star = "return document.getElementById('pareto').data[1].x[0]"
    caption = "return document.getElementById('pareto').layout.title.text"
    before = browser.execute_script(star), browser.execute_script(caption)
    assert before[1].startswith("eta 0.5")
    # What a click on the slider does.
    browser.execute_script(
        "const plot = document.getElementById('pareto');"
        "const steps = plot.layout.sliders[0].steps;"
        "const last = steps[steps.length - 1]; Plotly[last.method](plot, ...last.args);"
    )
    after = browser.execute_script(star), browser.execute_script(caption)
    assert after[0] > before[0], "energy alone must be slower than time and energy"
    assert after[1].startswith("eta 1")


@pytest.mark.slow
def test_screenshot_shows_both_gpus_in_their_colours(browser, written, tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    import numpy as np
    from selenium.webdriver.common.by import By

    show(browser, written, 1100)
    browser.find_element(By.ID, "timeline").screenshot(str(tmp_path / "timeline.png"))
    pixels = (image.imread(tmp_path / "timeline.png")[..., :3] * 255).round()
    for name, colour in (("A10", (0, 114, 178)), ("T4", (230, 159, 0))):
        share = np.mean(np.all(np.abs(pixels - colour) < 3, axis=-1))
        assert share > 0.05, f"no bar of the {name}"
