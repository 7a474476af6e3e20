"""One offline browser for all tests, and reports to open in it."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from run_folders import CONFIG, everything, happened, training, write_run

from trainformer.report import write_report

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip


@dataclass
class Visit:
    """A page and its faults: errors, console messages, and requests for anything but itself."""

    page: object
    faults: list = field(default_factory=list)

    def tone(self, title: str, colour: str, x: float | None = None) -> int:
        """The number of pixels of a plot with a colour, in total or near a value of the x axis."""
        script = """([title, red, green, blue, at]) => {
            const canvas = document.querySelector(`figure[data-title="${title}"] canvas`);
            const { width, height } = canvas;
            const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(0, 0, width, height);
            const near = (a, b) => Math.abs(a - b) <= 2;
            let count = 0;
            for (let n = 0; n < data.length; n += 4) {
                if (at !== null && Math.abs(((n / 4) % width) - at) > 4) continue;
                const [r, g, b, opaque] = data.slice(n, n + 4);
                if (near(r, red) && near(g, green) && near(b, blue) && opaque > 150) count += 1;
            }
            return count;
        }"""
        red, green, blue = bytes.fromhex(colour.removeprefix("#"))
        self.wait_for_plot(title)
        at = None if x is None else self.plot(title, f"u.valToPos({x}, 'x', true)")
        return self.page.evaluate(script, [title, red, green, blue, at])

    def plot(self, title: str, what: str):
        """Evaluate an expression on the uPlot `u` of a metric."""
        self.wait_for_plot(title)
        return self.page.evaluate(f"() => {{ const u = {self._box(title)}.uplot; return {what}; }}")

    def wait_for_plot(self, title: str) -> None:
        """A plot is drawn when the browser reports that it is in sight, which may be after the page has loaded."""
        self.page.wait_for_function(f"() => {self._box(title)}?.uplot !== undefined")

    def _box(self, title: str) -> str:
        return f'document.querySelector(`figure[data-title="{title}"] .canvas`)'

    def hover(self, title: str, x: float) -> None:
        """Move the mouse to a value of the x axis."""
        over = self.page.locator(f'figure[data-title="{title}"] .u-over')
        over.scroll_into_view_if_needed()
        inside = f"Math.min(u.over.clientWidth - 1, u.valToPos({x}, 'x'))"
        over.hover(position={"x": self.plot(title, inside), "y": 60})

    def tooltip(self, title: str) -> dict:
        """The values in the tooltip of a plot, by run and metric."""
        cells = self.page.locator(f'figure[data-title="{title}"] .tip .value').all()
        return {(c.get_attribute("data-run"), c.get_attribute("data-name")): c.inner_text() for c in cells}


@pytest.fixture(scope="module")  # not session: processes forked by other tests would hold its pipes open
def chromium():
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    sync_api = pytest.importorskip("playwright.sync_api") if "CI" not in os.environ else None
    if sync_api is None:
        from playwright import sync_api
    if executable is None:
        if "CI" in os.environ:
            pytest.fail("no chromium on the PATH: reports would go untested")
        pytest.skip("no chromium on the PATH")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def screens(chromium):
    """One browser context per screen: creating one takes as long as opening a report."""
    made = {}

    def screen(scheme: str, width: int, height: int):
        if (scheme, width, height) not in made:
            size = {"width": width, "height": height}
            made[scheme, width, height] = chromium.new_context(
                offline=True, viewport=size, color_scheme=scheme, timezone_id="UTC"
            )
        return made[scheme, width, height]

    return screen


@pytest.fixture
def visit(screens):
    """Open a report from disk, offline. Faults fail the test at its end."""
    opened = []

    def open_(path: Path, *, scheme="light", width=1280, height=900) -> Visit:
        seen = Visit(screens(scheme, width, height).new_page())
        opened.append(seen)
        page, address = seen.page, path.resolve().as_uri()
        page.set_default_timeout(120_000)
        page.on("console", lambda message: seen.faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: seen.faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (seen.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda r: None if r.url.split("#")[0] == address else seen.faults.append(r.url[:200]))
        page.goto(address)
        return seen

    yield open_
    for seen in opened:
        seen.page.evaluate("localStorage.clear()")  # shared by all file:// pages
        seen.page.close()
        assert not seen.faults, seen.faults


@pytest.fixture(scope="session")
def rich(tmp_path_factory):
    """A report of a run with every kind of content."""
    return write_report(everything(tmp_path_factory.mktemp("rich") / "everything"))


@pytest.fixture(scope="session")
def three(tmp_path_factory):
    """A report of three runs with different steps and settings."""
    folder = tmp_path_factory.mktemp("three")
    everything(folder / "first")
    second = {**CONFIG, "lr": (3e-3, "user"), "dropout": (0.1, "default")}
    write_run(folder / "second", list(training(120, 3, 0.2)), happened(120)[:5], config=second)
    write_run(folder / "third", list(training(90, 5, 0.4)), config={**CONFIG, "epochs": (9, "user")})
    return write_report([folder / name for name in ("first", "second", "third")], folder)
