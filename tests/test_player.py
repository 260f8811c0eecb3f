"""The player: its frames against the replay, and the drawn page in a browser against its frames.

The browser looks at a page of its own with five players on it, so the site need not be built; `make test-site` runs
these. The test in JupyterLab needs --flags long, jupyterlab, anywidget and selenium.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import test_site
from cells import ROOT

from walkvllm.player import NO_FRAME, PARTS, Player, example_run, frames, played, rerun, state_at
from walkvllm.recording import record_walk
from walkvllm.replay import states
from walkvllm.sampling_params import SamplingParams
from walkvllm.show import example
from walkvllm.trace import Run, record

chrome = test_site.browser  # the fixture
site = pytest.mark.site


# ---- without a browser ----

def two_processes() -> Run:
    with example.llm(multiprocess=True) as llm:
        return record_walk(llm, example.prompts, example.params, example.names)


def two_answers() -> Run:
    params = [SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=5), *example.params[1:]]
    return record_walk(example.llm(), example.prompts, params, example.names)


RUNS: dict[str, Callable[[], Run]] = {
    "example": example_run,
    "preemption": functools.partial(rerun, num_gpu_blocks_override=11, max_model_len=80),
    "arrivals": functools.partial(rerun, (0, 3, 6), max_num_batched_tokens=4),
    "priority": functools.partial(rerun, (0, 3, 6), (2, 1, 0), scheduling_policy="priority", max_num_seqs=1),
    "two answers": two_answers,
    "two processes": two_processes,
}


@pytest.mark.parametrize("run", RUNS)
def test_frames_say_what_the_replay_says(run: str) -> None:
    recorded = RUNS[run]()
    drawn, there = frames(recorded), list(states(recorded))
    there = [s for s, e in zip(there, recorded.events, strict=True) if e.stop not in NO_FRAME]
    assert len(drawn["frames"]) == len(there)
    names = [q["name"] for q in drawn["requests"]]
    for i, s in enumerate(there):
        state = state_at(drawn, i)
        assert [names[r] for r in state["waiting"]] == s.waiting and [names[r] for r in state["running"]] == s.running
        assert {names[int(k[5:])]: v for k, v in state.items() if k.startswith("held.")} == s.blocks
        assert (state["free"], set(state["remembered"])) == (len(s.free), s.remembered)
        assert {names[int(k[5:])]: v for k, v in state.items() if k.startswith("text.")} == {
            n: t for n, t in s.texts.items() if t}
        assert {names[int(k[5:])]: v for k, v in state.items() if k.startswith("done.")} == s.finished


@pytest.mark.parametrize("page", PARTS)
def test_part_loses_nothing(page: str) -> None:
    """Between the frames that a stop's part keeps, nothing is lost: its states are states of the whole."""
    whole, part = played().data["runs"][0], played(page).data["runs"][0]
    states = [state_at(whole, i) for i in range(len(whole["frames"]))]
    mine = [state_at(part, i) for i in range(len(part["frames"]))]
    rest = iter(states)
    assert mine and all(any(s == other for other in rest) for s in mine)  # in this order


def test_weight() -> None:
    drawn = json.dumps(frames(example_run()), ensure_ascii=False, separators=(",", ":"))
    assert len(drawn.encode()) < 100_000
    assert len(played("07")._repr_html_()) < 60_000
    script = (ROOT / "walkvllm/data/player.js").read_text(encoding="utf-8")
    assert len(script.splitlines()) < 550
    assert not [word for word in ("http", "import ", "fetch(", "url(", "</script", "<!--") if word in script]


# ---- in a browser ----

THEME = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --color-background-primary: #fff; --color-foreground-primary: #000 }
body { background: #fff; color: #000; margin: 12px; font: 16px sans-serif }
@media (prefers-color-scheme: dark) { :root { --color-background-primary: #131416; --color-foreground-primary: #cfd0d0 }
body { background: #131416; color: #cfd0d0 } }
button, i, b { color: red; float: right; font-size: 30px } /* a page's own rules do not reach into a player */
</style><title>players</title><input id="elsewhere">"""
TOOLS = """
const host = arguments[0], root = host.shadowRoot;
const $ = s => root.querySelector(s), $$ = s => [...root.querySelectorAll(s)];
const plain = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
const visible = e => e.checkVisibility({ visibilityProperty: true });
const texts = but => $$('.player *').filter(e => plain(e) && visible(e) && !e.closest(but));
const now = s => $(`[data-p="${s}"]`), words = e => e.textContent.replace(/\\s+/g, ' ').trim();
const go = i => { $('.slide').value = i; $('.slide').dispatchEvent(new Event('input')); };
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with players: the whole walk, its part for page 07, the whole walk again, two runs, page 04's part."""
    pair = Player(example_run(), beside=RUNS["preemption"](), titles=("one", "the other"))
    shown = [Player(example_run()), Player(example_run(), only="07"), Player(example_run()), pair,
             Player(example_run(), only="04")]
    path = tmp_path_factory.mktemp("players") / "players.html"
    path.write_text(THEME + "<hr>".join(p._repr_html_() for p in shown), encoding="utf-8")
    return path.as_uri()


def players(
    chrome: Any, page: str, width: int = 1440, scheme: str = "light", motion: str = "no-preference"
) -> list[Any]:
    """Opens the page; the elements that hold the players."""
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
    media = [{"name": name, "value": value} for name, value in features.items()]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    test_site.size(chrome, width)
    chrome.get_log("browser")
    chrome.get(page)
    found: list[Any] = chrome.execute_script("return [...document.querySelectorAll('.walk-player > :not(.still)')]")
    assert len(found) == 5
    return found


def ask(chrome: Any, host: Any, script: str, *more: Any) -> Any:
    return chrome.execute_script(TOOLS + script, host, *more)


def place(chrome: Any, host: Any) -> int:
    return int(ask(chrome, host, "return Number($('.slide').value)"))


def press(chrome: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    for key in keys:
        ActionChains(chrome).send_keys(key).perform()


def wait_for(chrome: Any, condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


DRAWN = """
const list = n => [...now('queues').children[n].querySelectorAll('.pill')].map(words);
return arguments[1].map(i => { go(i);
  return { when: $('.when').firstChild.textContent.trim(), waiting: list(0), running: list(1),
    held: [...now('pool').querySelectorAll('.held')].map(b => Number(words(b))),
    kept: [...now('pool').querySelectorAll('.kept')].map(b => Number(words(b))),
    tables: [...now('requests').querySelectorAll('.table')].map(t => [...t.children].map(b => Number(words(b)))),
    free: words(now('pool right')), row: now('row').querySelectorAll('.tok:not(.ghost)').length,
    sampled: [...now('row').querySelectorAll('.out .pill')].map(p => p.textContent),
    spent: [...now('budget').querySelectorAll('.bar i')].map(b => Number(words(b))),
    texts: [...now('requests').querySelectorAll('.keep > .text:first-child')].map(t => t.textContent),
    here: $('.stop.here')?.getAttribute('aria-label') ?? '', heard: $('.hear').textContent }; });
"""


def expected(drawn: dict[str, Any], i: int) -> dict[str, Any]:
    """What the page must show in frame i, from Python's side."""
    s, frame, requests = state_at(drawn, i), drawn["frames"][i], drawn["requests"]
    held = {int(k[5:]): v for k, v in s.items() if k.startswith("held.")}
    every = sorted({b for blocks in held.values() for b in blocks})
    tokens = {r: len(slots) for r, _, slots in s.get("row", ())}
    return {
        "when": (f"Step {frame['s']}" if frame["s"] else "On the way in") + f": {frame['n']}",
        "waiting": [requests[r]["name"] for r in s["waiting"]], "running": [requests[r]["name"] for r in s["running"]],
        "held": every, "kept": sorted(set(s["remembered"]) - set(every)),
        "tables": [held.get(r, []) for r in range(len(requests))],
        "free": f"{s['free']} of {drawn['engine']['num_blocks'] - 1} free", "row": sum(tokens.values()),
        "sampled": [word.replace("\n", "↵") for _, _, word in s.get("sampled", ())],
        "spent": [n for _, n, _ in s.get("budget", {}).get("spent", ())],
        "here": frame["p"],
    }  # fmt: skip


@site
@test_site.needs_browser
def test_every_frame_shows_what_the_run_says(chrome: Any, page: str) -> None:
    drawn = frames(example_run())
    seen = ask(chrome, players(chrome, page)[0], DRAWN, list(range(len(drawn["frames"]))))
    for i, there in enumerate(seen):
        want, frame = expected(drawn, i), drawn["frames"][i]
        here, texts = there.pop("here"), there.pop("texts")
        heard = there.pop("heard")
        assert here.split()[1] == want.pop("here") and there == want, f"frame {i}"
        assert all(sentence in heard for _, sentence in frame["say"])
        for r, text in enumerate(texts):
            assert state_at(drawn, i).get(f"text.{r}", "").replace("\n", "↵") in text, f"frame {i}"


@site
@test_site.needs_browser
def test_two_runs_on_one_slider(chrome: Any, page: str) -> None:
    runs = [frames(example_run()), frames(RUNS["preemption"]())]
    moments = Player(example_run(), beside=RUNS["preemption"]()).data["moments"]
    host = players(chrome, page)[3]
    script = "return arguments[1].map(i => { go(i); return $$('.when').map(e => e.firstChild.textContent.trim())\n" \
             ".concat($$('[data-p=\"pool right\"]').map(words)); })"
    for (a, b), there in zip(moments, ask(chrome, host, script, list(range(len(moments)))), strict=True):
        left, right = expected(runs[0], a), expected(runs[1], b)
        # the sizers hold a heading of their own: first, drawn, sizer; second, drawn, sizer
        assert [there[0], there[2]] == [left["when"], right["when"]] and there[4:] == [left["free"], right["free"]]
    tops = ask(chrome, host, "return $$('.views > div').map(v => Math.round(v.getBoundingClientRect().top))")
    assert tops[0] == tops[1]
    host = players(chrome, page, 390)[3]
    tops = ask(chrome, host, "return $$('.views > div').map(v => Math.round(v.getBoundingClientRect().top))")
    assert tops[0] < tops[1]


@site
@test_site.needs_browser
def test_clicks(chrome: Any, page: str) -> None:
    hosts = players(chrome, page)
    click = "$(arguments[1]).click(); return Number($('.slide').value)"
    last = len(frames(example_run())["frames"]) - 1
    presses = [("step", 1), ("step", 2), ("back", 1), ("last", last), ("step", last), ("first", 0), ("back", 0)]
    assert [ask(chrome, hosts[0], click, f"[data-do={what}]") for what, _ in presses] == [at for _, at in presses]
    ask(chrome, hosts[0], "$('.shape').dispatchEvent(new MouseEvent('click', { bubbles: true, composed: true,"
                          "clientX: $('.shape').getBoundingClientRect().right - 2 }))")
    assert place(chrome, hosts[0]) == last
    assert [place(chrome, h) for h in hosts[1:]] == [0] * 4, "a player moves another one"
    assert chrome.execute_script("return Object.keys(window.walkvllmPlayers).length") == 1


@site
@test_site.needs_browser
def test_follow_a_request(chrome: Any, page: str) -> None:
    host, drawn = players(chrome, page)[0], frames(example_run())["frames"]
    assert ask(chrome, host, "return $('[data-do=next]').disabled && $('[data-do=before]').disabled")
    mine = [i for i, frame in enumerate(drawn) if 1 in frame["w"]]
    ask(chrome, host, "$('[data-name=sum]').click()")
    at = [ask(chrome, host, "$('[data-do=next]').click(); return Number($('.slide').value)") for _ in mine]
    assert at == [*mine, mine[-1]][: len(at)]
    assert ask(chrome, host, "return $('[data-do=next]').disabled")
    ask(chrome, host, "go(arguments[1])", mine[len(mine) // 2])
    dim = "return [...new Set($$('[data-r]').map(e => e.dataset.r + e.classList.contains('dim')))].sort()"
    assert set(ask(chrome, host, dim)) == {"0true", "1false", "2true", "false"}
    ask(chrome, host, "$('[data-name=sum]').click()")
    assert set(ask(chrome, host, dim)) == {"0false", "1false", "2false", "false"}


WILD = ["</script><b>", "\u202ebackwards", "\u05e9\u05dc\u05d5\u05dd", "a\nb", 'q"uo\'te', "\U0001f642", "x" * 3000,
        "0_a", "a", "__proto__", "&lt;", "<!--", " "]  # fmt: skip


@site
@test_site.needs_browser
@pytest.mark.parametrize("width", [390, 1440])
def test_odd_names_and_many(chrome: Any, tmp_path: Path, width: int) -> None:
    """Names that are markup, that turn a line round or have no end, and more requests than a row of buttons holds."""
    engine = example.llm(max_num_seqs=8).llm_engine
    with record(engine) as run:
        for i, name in enumerate([*WILD, *WILD[:2], *map(str, range(30))]):
            if i == len(WILD):
                while engine.has_unfinished_requests():
                    engine.step()
            engine.add_request(name, f"Once {name[:30]} was", SamplingParams(temperature=0.0, max_tokens=3))
        engine.abort_request("29")
        while engine.has_unfinished_requests():
            engine.step()
    shown, path = Player(run), tmp_path / "odd.html"
    path.write_text(THEME + shown._repr_html_(), encoding="utf-8")
    test_site.size(chrome, width)
    chrome.get_log("browser")
    chrome.get(path.as_uri())
    host = chrome.execute_script("return document.querySelector('.walk-player > :not(.still)')")
    names = [q["name"] for q in shown.data["runs"][0]["requests"]]
    assert len(set(names)) == len(names) == len(WILD) + 32 and "</script><b> (2)" in names
    assert ask(chrome, host, "return [...$('.pick').options].map(o => o.value)") == ["", *names]
    mine = [i for i, frame in enumerate(shown.data["runs"][0]["frames"]) if names.index("29") in frame["w"]]
    follow = "$('.pick').value = '29'; $('.pick').dispatchEvent(new Event('change', { bubbles: true }));"
    ask(chrome, host, follow)
    for i in mine:
        assert ask(chrome, host, "$('[data-do=next]').click(); return Number($('.slide').value)") == i
        assert not ask(chrome, host, LOOK), i
    assert ask(chrome, host, "return $$('.player :is(b, script):not(.stop b)').length") == 0
    assert not [e["message"] for e in chrome.get_log("browser") if e["level"] in ("SEVERE", "ERROR")]


@site
@test_site.needs_browser
def test_keys(chrome: Any, page: str) -> None:
    from selenium.webdriver.common.keys import Keys
    host, drawn = players(chrome, page)[0], frames(example_run())["frames"]
    chrome.execute_script("document.getElementById('elsewhere').focus()")
    press(chrome, Keys.ARROW_RIGHT, Keys.END, "n", " ")
    assert place(chrome, host) == 0, "a key that was pressed elsewhere moves the player"
    down = ask(chrome, host, "$('.player').focus(); return scrollY")
    press(chrome, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert place(chrome, host) == 1
    press(chrome, Keys.END)
    assert place(chrome, host) == len(drawn) - 1
    press(chrome, Keys.HOME, "n")
    assert place(chrome, host) == 0  # nobody is followed
    ask(chrome, host, "$('[data-name=count]').click(); $('.player').focus()")
    press(chrome, "n", "n", "p")
    assert place(chrome, host) == [i for i, frame in enumerate(drawn) if 2 in frame["w"]][0]
    ask(chrome, host, "$('select').value = 4; $('.player').focus()")
    press(chrome, " ")
    wait_for(chrome, lambda: place(chrome, host) > 14)
    assert ask(chrome, host, "return $('[data-do=play]').getAttribute('aria-label')") == "pause (space)"
    assert ask(chrome, host, "return $('.hear').textContent") == ""  # nobody can listen that fast
    press(chrome, " ")
    at = place(chrome, host)
    time.sleep(0.6)
    assert place(chrome, host) == at
    assert ask(chrome, host, "return $('.hear').textContent").startswith("Step")
    assert chrome.execute_script("return scrollY") == down  # space and arrows are the player's


@site
@test_site.needs_browser
def test_names_for_a_screen_reader(chrome: Any, page: str) -> None:
    for host in players(chrome, page):
        names = ask(chrome, host, """return $$('.player, .slide, button, select, a').map(e =>
            e.getAttribute('aria-label') || words(e))""")
        assert all(names) and names[0].startswith("A recorded run: 3 requests, 25 steps")
        assert ask(chrome, host, "return $('.player').getAttribute('role')") == "group"
        assert ask(chrome, host, "return $('.hear').getAttribute('aria-live')") == "polite"
        ask(chrome, host, "go(5)")
        assert ask(chrome, host, "return $('.slide').getAttribute('aria-valuetext')") == ask(
            chrome, host, "return $('.when').firstChild.textContent.trim()")


LOOK = """
const width = document.documentElement.clientWidth, bad = [];
for (const e of texts('.hear, style, select, title, .tiny')) {
  const box = e.getBoundingClientRect();
  if (box.right > width + 1 || box.left < -1) bad.push('too wide: ' + words(e));
  if (parseFloat(getComputedStyle(e).fontSize) < 10) bad.push('too small: ' + words(e));
}
const apart = $$('.stop b, .stop em, .tag, .mail').filter(e => e.checkVisibility() && words(e)).map(e => {
  const r = document.createRange(); r.selectNodeContents(e); return [words(e), r.getBoundingClientRect()]; });
for (const [i, [a, p]] of apart.entries()) for (const [b, q] of apart.slice(i + 1))
  if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
    bad.push(`${a} on ${b}`);
if (document.documentElement.scrollWidth > width + 1) bad.push('the page scrolls');
return [...new Set(bad)].slice(0, 9);
"""


@site
@test_site.needs_browser
@pytest.mark.parametrize("width", [320, 390, 620, 928, 1440])
def test_layout(width: int, chrome: Any, page: str) -> None:
    """Nothing is cut off, too small or on top of something else, and nothing jumps while the run plays."""
    hosts = players(chrome, page, width)
    for host in hosts:
        n = ask(chrome, host, "return Number($('.slide').max)")
        heights = set()
        for i in range(0, n + 1, 7):
            ask(chrome, host, "go(arguments[1])", i)
            heights.add(ask(chrome, host, "return Math.round(host.getBoundingClientRect().height)"))
            assert not ask(chrome, host, LOOK), f"frame {i}"
        assert max(heights) - min(heights) <= 1, sorted(heights)


COLOURS = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255);
}
const over = (a, b) => a.slice(0, 3).map((v, i) => v * a[3] + b[i] * (1 - a[3]));
const light = c => c.map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
function ground(e) {
  const layers = [];
  for (; e; e = e.parentElement || e.getRootNode().host) layers.push(rgba(getComputedStyle(e).backgroundColor));
  return layers.reverse().reduce((below, c) => over(c, below), [1, 1, 1]);
}
return texts('.hear, style, title, s, option, :disabled, .b').map(e => {
  const b = ground(e), a = [light(over(rgba(getComputedStyle(e).color), b)), light(b)].sort((x, y) => y - x);
  return [(a[0] + .05) / (a[1] + .05), words(e)];
}).filter(([ratio]) => ratio < 4).slice(0, 5);
"""


@site
@test_site.needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(scheme: str, chrome: Any, page: str) -> None:
    """Words can be told from what is behind them."""
    for host in players(chrome, page, scheme=scheme):
        for i in (2, 20, 45):
            ask(chrome, host, "go(arguments[1])", i)
            assert not ask(chrome, host, COLOURS)


@site
@test_site.needs_browser
def test_reduced_motion(chrome: Any, page: str) -> None:
    moving = "go(16); return host.shadowRoot.getAnimations().length"
    assert ask(chrome, players(chrome, page)[0], moving) > 0
    assert ask(chrome, players(chrome, page, motion="reduce")[0], moving) == 0


@site
@test_site.needs_browser
def test_hover_tells_the_numbers(chrome: Any, page: str) -> None:
    host = players(chrome, page)[0]
    ask(chrome, host, "go(20); $('.pool .b').dispatchEvent(new PointerEvent('pointerover', { bubbles: true }))")
    assert ask(chrome, host, "return words($('.detail'))") == "block 1: held by story; slots 8 to 15"
    ask(chrome, host, "$('.panels .panel').focus(); $$('.panel')[3].focus()")
    assert ask(chrome, host, "return words($('.detail'))").startswith("block 1: held by story; slots 8 to 15 · block 2")


@site
@test_site.needs_browser
def test_no_error_and_no_request(chrome: Any, page: str) -> None:
    test_site.requests(chrome)
    for host in players(chrome, page):
        ask(chrome, host, "for (let i = 0; i < 30; i++) go(i); for (const _ of 'ab') $('[data-do=play]').click()")
    assert not [e["message"] for e in chrome.get_log("browser") if e["level"] in ("SEVERE", "ERROR")]
    assert test_site.requests(chrome) == [page]


@site
@test_site.needs_browser
def test_without_scripts(chrome: Any, page: str) -> None:
    chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chrome.get(page)
        stills = chrome.find_elements("css selector", ".still")
        assert len(stills) == 5
        assert "story: 28 tokens" in stills[0].text and "13 sampling" in stills[0].text
        assert "step 3: story 1 decode" in stills[1].text
    finally:
        chrome.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@site
@test_site.needs_browser
@pytest.mark.skipif(not test_site.PAGES, reason="the site is not built: make site")
def test_front_page(chrome: Any) -> None:
    """The site opens with the whole walk; its stops lead to their pages."""
    test_site.size(chrome, 1440)
    chrome.get(f"{test_site.SITE.as_uri()}/index.html")
    host = chrome.execute_script("return document.querySelector('.walk-player > :not(.still)')")
    before = "return host.compareDocumentPosition(document.querySelector('h2')) & Node.DOCUMENT_POSITION_FOLLOWING"
    assert ask(chrome, host, before) and ask(chrome, host, "return $$('a[href]').length") == 16
    ask(chrome, host, "$('[data-to=\"10\"]').click()")
    wait_for(chrome, lambda: chrome.current_url.endswith("kernels/10_paged_write.html"))


# ---- in a running notebook ----

NOTEBOOK = [
    "from walkvllm.player import *\nfrom walkvllm.show import Explorer\nPlayer(example_run(), start=20)",
    "widget = Player(example_run(), start=30).widget()\nwidget",
    "import ipywidgets\nheard = ipywidgets.Label()\n"
    "widget.observe(lambda _: setattr(heard, 'value', f'{widget.at} {widget.focus}'))\ndisplay(heard)\nwidget.at = 40",
    "Explorer(experiment, budget=[16, 4], pool=[11, 16], threshold=[0], policy=['fcfs'], arrivals=['together'])",
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in a JupyterLab of its own."""
    nbformat = pytest.importorskip("nbformat")
    for needed in ("jupyterlab", "anywidget", "ipywidgets", "ipykernel"):
        pytest.importorskip(needed)
    (tmp_path / "nb").mkdir()
    cells = [nbformat.v4.new_code_cell(text) for text in NOTEBOOK]
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "nb/players.ipynb")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own = {f"JUPYTER_{what}_DIR": str(tmp_path / what) for what in ("CONFIG", "DATA", "RUNTIME")}
    env = os.environ | own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}", "--ServerApp.ip=127.0.0.1",
         "--allow-root", "--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path / 'nb'}"],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        end = time.monotonic() + 60
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/api/status", timeout=2).read()
                break
            except OSError:
                assert time.monotonic() < end and server.poll() is None
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab/tree/players.ipynb?reset"
    finally:
        server.terminate()
        server.wait(20)


@pytest.mark.long
@test_site.needs_browser
def test_in_jupyterlab(chrome: Any, lab: str) -> None:
    """An output, a widget that hears Python and is heard, and controls that run the engine again."""
    def hosts() -> list[Any]:
        found: list[Any] = chrome.execute_script(
            "return [...document.querySelectorAll('.jp-OutputArea-output *')]"
            ".filter(e => e.shadowRoot?.querySelector('.player'))")
        return found

    test_site.size(chrome, 1500, 3000)
    chrome.get(lab)
    wait_for(chrome, lambda: bool(chrome.find_elements("css selector", ".jp-Notebook .jp-Cell")), 60)
    time.sleep(3)
    chrome.find_element("xpath", "//div[contains(@class,'lm-MenuBar-itemLabel') and text()='Run']").click()
    time.sleep(1)
    items = chrome.find_elements("css selector", ".lm-Menu-itemLabel")
    next(e for e in items if e.text.startswith("Run All Cells")).click()
    wait_for(chrome, lambda: len(hosts()) == 3, 90)
    output, widget, beside = hosts()
    wait_for(chrome, lambda: place(chrome, widget) == 40)  # Python has moved it
    assert place(chrome, output) == 20 and len(ask(chrome, beside, "return $$('.shape')")) == 2
    ask(chrome, output, "$('[data-do=step]').click(); $('.player').focus()")
    press(chrome, "n", " ", " ")  # no command of JupyterLab
    assert place(chrome, output) == 21 and len(hosts()) == 3
    ask(chrome, widget, "$('[data-name=story]').click(); $('[data-do=next]').click()")
    at = place(chrome, widget)
    assert at > 40
    notebook = chrome.find_element("css selector", ".jp-Notebook")
    wait_for(chrome, lambda: f"{at} story" in notebook.text)  # Python has heard it
    assert not [e["message"] for e in chrome.get_log("browser") if e["level"] in ("SEVERE", "ERROR")]

