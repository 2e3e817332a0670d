"""The report in a real browser: it opens cleanly, works, and fits a phone."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cdpg.report import write_report
from report_runs import METHODS, compare_folder, run_folder, write_json
from rounds import ordinary
from unpainted import is_one_of_a_kind, painted_if

REQUIRED = "CDPG_REQUIRE_BROWSER"
"""Set where a browser must be there: a test that finds none then fails."""
MOST_BYTES = 5_000_000
MOST_SECONDS = 20


def missing(what: str) -> None:
    notice = f"no {what}: the report was not looked at in a browser"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{notice}, and {REQUIRED} is set")
    pytest.skip(notice)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    try:
        from selenium import webdriver
    except ImportError:
        missing("selenium")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        missing("chromium with chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(program)
    profile = tmp_path_factory.mktemp("profile")
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=str(driver))
    session = webdriver.Chrome(options=options, service=service)
    session.set_page_load_timeout(60)
    yield session
    session.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = compare_folder(tmp_path_factory.mktemp("runs") / "compare", epochs=1000)
    start = time.process_time()  # of this process: others may keep the machine busy
    page = write_report([folder], folder / "report.html")
    (folder / "seconds").write_text(str(time.process_time() - start))
    return page


def test_size_and_time_of_a_comparison(report: Path) -> None:
    size, seconds = report.stat().st_size, float(report.with_name("seconds").read_text())
    assert size < MOST_BYTES and seconds < MOST_SECONDS, f"{size:,} bytes in {seconds:.1f} s"


def show(browser: Any, page: Path, width: int = 1200, dark: bool = False) -> None:
    """Open a page anew, without a stored theme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": scheme})
    browser.get(page.as_uri())
    browser.execute_script("localStorage.clear()")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(page.as_uri())


def requests(browser: Any) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def background(browser: Any) -> str:
    return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))


def column(browser: Any, table: str, place: int) -> list[str]:
    cells = "document.querySelectorAll('#t-' + arguments[0] + ' tbody tr')"
    return list(
        browser.execute_script(f"return Array.from({cells}, row => row.children[arguments[1]].innerText)", table, place)
    )


def test_it_opens_without_errors_or_requests(browser: Any, report: Path) -> None:
    show(browser, report)
    assert browser.get_log("browser") == []
    assert [address for address in requests(browser) if not address.startswith("data:")] == [report.as_uri()]
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_the_policy_holds(browser: Any, report: Path, tmp_path: Path) -> None:
    """The errors that the test above looks for do appear when a page has something that the policy forbids."""
    spoilt = tmp_path / "spoilt.html"
    extra = '<p style="color:red" id="x">x</p><script>window.pwned = 1</script></body>'
    spoilt.write_text(report.read_text(encoding="utf-8").replace("</body>", extra), encoding="utf-8")
    show(browser, spoilt)
    assert browser.execute_script("return window.pwned") is None
    assert len(browser.get_log("browser")) == 2


def test_figures_are_drawn(browser: Any, report: Path) -> None:
    show(browser, report)
    measure = "e => [e.getBBox().width, e.querySelectorAll('path').length]"
    figures = browser.execute_script(f"return Array.from(document.querySelectorAll('figure svg'), {measure})")
    assert len(figures) > 20 and all(width > 100 and paths > 5 for width, paths in figures)
    within = (
        "return Array.from(document.querySelectorAll('figure svg')).flatMap(svg => {"
        " const box = svg.getBoundingClientRect();"
        " const beyond = r => r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1;"
        " return Array.from(svg.querySelectorAll('text')).filter(t => beyond(t.getBoundingClientRect()))"
        "  .map(t => t.textContent); })"
    )
    assert browser.execute_script(within) == [], "text that lies outside its figure"


def test_tables_are_sorted_by_a_click(browser: Any, report: Path) -> None:
    show(browser, report)
    before = column(browser, "requirement", 0)
    head = browser.find_elements("css selector", "#t-requirement thead button")[1]
    head.click()
    first = column(browser, "requirement", 1)
    values = [float(cell.split()[0]) for cell in first]
    assert values == sorted(values, reverse=True) and column(browser, "requirement", 0) != before
    head.click()
    assert [float(cell.split()[0]) for cell in column(browser, "requirement", 1)] == sorted(values)
    assert (
        browser.execute_script("return document.querySelectorAll('#t-requirement [aria-sort=ascending]').length") == 1
    )
    browser.find_elements("css selector", "#t-requirement thead button")[0].click()
    assert column(browser, "requirement", 0) == before


def test_dark_and_light(browser: Any, report: Path) -> None:
    show(browser, report)
    line = "return getComputedStyle(document.querySelector('figure svg [stroke=\"#0b6fd8\"]')).stroke"
    light, drawn = background(browser), browser.execute_script(line)
    button = browser.find_element("id", "theme")
    assert button.text == "Dark"
    button.click()
    assert background(browser) == "rgb(20, 24, 29)" != light and browser.execute_script(line) != drawn
    assert button.text == "Light"
    browser.refresh()
    assert background(browser) == "rgb(20, 24, 29)", "the choice is kept"
    button = browser.find_element("id", "theme")
    button.click()
    assert (background(browser), browser.execute_script(line)) == (light, drawn)
    show(browser, report, dark=True)
    assert background(browser) == "rgb(20, 24, 29)", "without a choice the system's"


@pytest.mark.parametrize("width", ordinary([380, 768, 1000, 1200], 380, 1000))
def test_nothing_is_wider_than_the_screen(browser: Any, report: Path, width: int) -> None:
    show(browser, report, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    wide = "Array.from(document.querySelectorAll('.scroller')).filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert browser.execute_script(f"return {wide}") == 0, "a table that scrolls within itself"


def test_paper_is_light_and_complete(browser: Any, report: Path) -> None:
    show(browser, report, 720, dark=True)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert background(browser) == "rgb(254, 254, 254)"
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 720
    assert browser.execute_script("return getComputedStyle(document.querySelector('.tool')).display") == "none"


def saved(browser: Any, folder: Path, selector: str) -> Path:
    """What a click on a button saves."""
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    button = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        files = [file for file in folder.iterdir() if file.suffix in (".svg", ".csv")]
        if files:
            return files[0]
        time.sleep(0.1)
    raise AssertionError("nothing was saved")


def test_a_figure_is_saved_as_svg(browser: Any, report: Path, tmp_path: Path) -> None:
    show(browser, report)
    file = saved(browser, tmp_path, "[data-svg='training-satisfaction']")
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert file.name == "training-satisfaction.svg" and root.get("width", "").endswith("pt")
    assert {"cdpg", "satisfaction", "training samples"} <= {element.text for element in root.iter()}
    show(browser, file)
    assert browser.get_log("browser") == []


def test_a_table_is_saved_as_csv(browser: Any, report: Path, tmp_path: Path) -> None:
    show(browser, report)
    file = saved(browser, tmp_path, "[data-csv='requirement']")
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8-sig"), newline="")))
    assert [row["model"] for row in rows] == ["base", *METHODS, "ideal"]


def test_hostile_text_does_nothing(browser: Any, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", task="summarization-entities", epochs=20)
    bad = "</script></style></textarea><svg onload=window.pwned=1><img src=x onerror=window.pwned=1>\u202e$\\x$"
    content = json.loads((run / "evaluation.json").read_text())
    content["examples"] = [
        {"row": 0, "prompt": bad, "columns": {bad: bad}, "outputs": {"tuned": [{"text": bad * 40, "b": 1}]}}
    ]
    content["frequencies"] = {"tuned": {bad: {bad: 3, f"{bad}2": 4}}}
    content["tuned"][bad] = {"mean": 1, "low": 0, "high": 2}
    content["command"] = bad
    write_json(run / "evaluation.json", content)
    with painted_if(is_one_of_a_kind):
        page = write_report([run], tmp_path / "report.html")
    show(browser, page, 380)
    assert browser.execute_script("return window.pwned") is None
    assert browser.get_log("browser") == [] and browser.execute_script("return document.images.length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 380
