"""The site in a browser. `make test-site` builds it and runs these; they need Debian's chromium and chromium-driver."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from cells import ROOT

SITE = ROOT / "docs/_build/html"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html")) if SITE.exists() else []
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no browser: apt-get install chromium chromium-driver")
pytestmark = [pytest.mark.site, pytest.mark.skipif(not PAGES, reason="the site is not built: make site")]


# ---- without a browser: links ----

class Links(HTMLParser):
    """The ids of a page, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []  # what a browser fetches by itself
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        a = {k: v or "" for k, v in attributes}
        self.ids |= {a[k] for k in ("id", "name") if k in a}
        if tag == "a" and "href" in a:
            self.links.append(a["href"])
        if tag == "link" and a.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(a["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in a:
            self.loads.append(a["src"])


@functools.cache
def links(path: Path) -> Links:
    return Links(path)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every link inside the site leads to a file and to an anchor that is there; nothing is loaded from outside."""
    here, bad = SITE / page, []
    for link in links(here).links + links(here).loads:
        url = urlsplit(link)
        if url.scheme in ("http", "https", "mailto", "data"):
            bad += [f"loads {link}"] * (link in links(here).loads and url.scheme != "data")
            continue
        target = (here.parent / unquote(url.path)).resolve() if url.path else here
        if not target.is_file():
            bad.append(f"{link}: no such file")
        elif url.fragment and target.suffix == ".html" and unquote(url.fragment) not in links(target).ids:
            bad.append(f"{link}: no such place")
    assert not bad, "\n".join(sorted(set(bad)))


def test_every_page_is_there() -> None:
    import cells
    for path in cells.pages():
        assert path.relative_to(ROOT / "nbs").with_suffix(".html").as_posix() in PAGES


def test_pages_have_a_route_and_neighbours() -> None:
    """A stop shows the route with itself lit, and leads to the page before and the page after."""
    text = (SITE / "06_blocks.html").read_text(encoding="utf-8")
    assert text.count('aria-label="The route of a request"') == 1 and text.count("aria-current=page") == 1
    assert 'rel="next" title="07 · Scheduler"' in text and 'rel="prev" title="05 · Engine core"' in text
    assert "src/kv_cache.html#L-" in text and "api/kv_cache.html#walkvllm.kv_cache.BlockPool" in text


# ---- with a browser ----

@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The site over HTTP, on a free port of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: make test-site installs it")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update",
                 "disable-sync", "disable-dev-shm-usage", f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    driver.get("about:blank")
    driver.get_log("performance")  # the browser's own first page
    yield driver
    driver.quit()


def size(browser: Any, width: int, height: int = 900) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})


def requests(browser: Any) -> list[str]:
    """What the browser has asked for since it was last asked."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


TOO_WIDE = """
const wide = [], width = document.documentElement.clientWidth;
const scrolls = e => e && e !== document.body && (/(auto|scroll|hidden)/.test(getComputedStyle(e).overflowX)
  && !e.matches('.content, .main, article, html') || scrolls(e.parentElement));
for (const e of document.querySelectorAll('article *')) {
  const box = e.getBoundingClientRect();
  if (box.width && box.right > width + 1 && !scrolls(e.parentElement) && !scrolls(e))
    wide.push(e.tagName + '.' + e.className + ' ' + Math.round(box.right) + ': ' + e.textContent.trim().slice(0, 60));
}
if (document.documentElement.scrollWidth > width + 1) wide.push('page ' + document.documentElement.scrollWidth);
return wide.slice(0, 5);
"""


@needs_browser
@pytest.mark.parametrize("page", PAGES)
def test_page_in_a_browser(page: str, browser: Any, server: str) -> None:
    """No error on the console, no request to elsewhere, no broken image; nothing is too wide, also on a telephone."""
    size(browser, 390)
    browser.get(f"{server}/{page}")
    for width in (390, 820, 1100, 1340, 1800):
        size(browser, width)
        assert not browser.execute_script(TOO_WIDE), f"at {width} px"
    errors = [e["message"] for e in browser.get_log("browser") if e["level"] in ("SEVERE", "ERROR")]
    assert not [e for e in errors if "favicon.ico" not in e]
    assert not [u for u in requests(browser) if not u.startswith((server, "data:"))]
    assert not browser.execute_script("return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)")


LIGHTNESS = """
const parts = c => c.match(/[\\d.]+/g).map(Number);
const light = c => { const [r, g, b] = parts(c); return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255; };
const ground = e => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0.5) return getComputedStyle(e).backgroundColor; } return 'rgb(255,255,255)'; };
return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent && e.textContent.trim()).map(e =>
  [light(ground(e)), light(getComputedStyle(e).color), e.textContent.trim().slice(0, 40)]);
"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["index.html", "06_blocks.html", "kernels/10_paged_write.html", "api/scheduler.html"])
def test_light_and_dark(page: str, scheme: str, browser: Any, server: str) -> None:
    """The page follows the reader's choice, and words can be told from what is behind them."""
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    size(browser, 1280)
    browser.get(f"{server}/{page}")
    what = "article p, article td, article th, article summary, article pre, article pre span, article dt, .route-top a"
    seen = browser.execute_script(LIGHTNESS, what)
    assert (seen[0][0] > 0.5) == (scheme == "light")
    assert not [s for s in seen if abs(s[0] - s[1]) < 0.2]


@needs_browser
@pytest.mark.parametrize("where", ["http", "file"])
@pytest.mark.parametrize(("term", "page"), [("slot_mapping", "10_paged_write"), ("preempted", "07_scheduler"),
                                            ("FreeKVCacheBlockQueue", "kv_cache")])
def test_search(where: str, term: str, page: str, browser: Any, server: str) -> None:
    """A search finds the page that explains a term, also without a server."""
    from selenium.webdriver.support.ui import WebDriverWait
    size(browser, 1280)
    browser.get_log("browser")
    browser.get(f"{server if where == 'http' else SITE.as_uri()}/search.html?q={term}")
    script = "return [...document.querySelectorAll('#search-results li a')].map(a => a.href)"
    WebDriverWait(browser, 20).until(lambda b: any(page in href for href in b.execute_script(script)))
    assert not [e["message"] for e in browser.get_log("browser")
                if e["level"] in ("SEVERE", "ERROR") and "favicon.ico" not in e["message"]]
