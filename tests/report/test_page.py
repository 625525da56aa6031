"""The page: whole by itself, well-formed, said as well as drawn, readable; and the picture."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stquant.report import figures
from stquant.report.history import History
from stquant.report.page import render
from stquant.report.runlog import read
from tests.report import runs

LOSSES = [(step, 5.0 - step / 10) for step in range(1, 46)]
VOID = {"meta", "input", "path"}
CONTRAST = 4.5
"""Of text, WCAG 2.2 level AA."""


def history(tmp_path: Path, budget: int | None = 2000) -> History:
    return History.of(read(runs.write(tmp_path / "run.jsonl", runs.decisions(budget), LOSSES)))


def page(tmp_path: Path, budget: int | None = 2000) -> str:
    return render(history(tmp_path, budget), "run.jsonl")


class Elements(HTMLParser):
    """All elements with their attributes; fails where an end tag does not fit."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    text = page(tmp_path)
    elements = Elements(text)
    assert not elements.all("script")
    assert not elements.all("link")
    assert not [a for _, a in elements.found if a.keys() & {"src", "href", "srcset", "action"}]
    assert not re.search(r"https?:|url\(|@import", text)


def test_the_page_says_what_it_draws(tmp_path: Path) -> None:
    elements = Elements(page(tmp_path))
    assert elements.all("html")[0]["lang"] == "en"
    assert len(elements.all("h1")) == len(elements.all("main")) == 1
    pictures = [attributes for _, attributes in elements.found if attributes.get("role") == "img"]
    assert len(pictures) == 3 + 4  # loss, bytes, damage; a strip for each state
    assert all(picture["aria-label"] for picture in pictures)
    assert {"exp_avg: dynamic2 from step 0, then mulaw4 from step 10, then dynamic3 from step 40"} <= {
        picture["aria-label"] for picture in pictures
    }
    assert all(header["scope"] in ("col", "row") for header in elements.all("th"))
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = [attributes["aria-labelledby"] for _, attributes in elements.found if "aria-labelledby" in attributes]
    assert set(labels) <= set(ids)


def test_every_tensor_and_every_reason_is_there_and_harmless(tmp_path: Path) -> None:
    text = page(tmp_path)
    elements = Elements(text)
    assert len(elements.all("details")) == len(elements.all("summary")) == 2
    assert not elements.all("b")
    for part in ("wte & <b>head", "h.0.mlp", "raised: saves <b>much</b> & more", "lowered: costs little"):
        assert html.escape(part) in text
    assert "dynamic2 to mulaw4" in text
    assert text.count("encode error below") == 2  # factors of both tensors


def test_an_exceeded_budget_is_said(tmp_path: Path) -> None:
    assert "The budget was exceeded</strong> at step 10, 20" in page(tmp_path, budget=1100)
    assert "exceeded" not in page(tmp_path, budget=2000)


def test_a_run_without_decisions_or_losses_has_a_page(tmp_path: Path) -> None:
    text = render(History.of(read(runs.write(tmp_path / "run.jsonl", [], LOSSES))), "run.jsonl")
    assert "no decisions" in text
    assert len([a for _, a in Elements(text).found if a.get("role") == "img"]) == 1
    Elements(render(History.of(read(runs.write(tmp_path / "run.jsonl", []))), "run.jsonl"))
    Elements(render(History.of(read(runs.write(tmp_path / "run.jsonl", runs.decisions(None)))), "run.jsonl"))


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_contrast_in_both_modes(tmp_path: Path) -> None:
    text = page(tmp_path)
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{([^}]*)\}", text))
    assert light.keys() == dark.keys()
    classes = dict(re.findall(r"\.(w\d) \{[^}]*[^-]color: ([^ ;]+);? \}", text))
    assert classes.keys() == {f"w{width}" for width in figures.WIDTH_COLOURS}
    assert {f"w{width}": colour for width, colour in figures.WIDTH_COLOURS.items()}.items() <= light.items()
    for mode in (light, dark):
        inks = {w: mode[ink[6:-1]] if ink.startswith("var") else ink for w, ink in classes.items()}
        pairs = {w: (mode[w], ink) for w, ink in inks.items()}
        pairs |= {f"{ink} on {on}": (mode[ink], mode[on]) for ink in ("ink", "soft") for on in ("page", "card")}
        for name, pair in pairs.items():
            low, high = sorted(map(_luminance, pair))
            assert (high + 0.05) / (low + 0.05) >= CONTRAST, name


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    from matplotlib import image

    figures.history(history(tmp_path), "all", tmp_path / "all.png")
    losses = History.of(read(runs.write(tmp_path / "run.jsonl", [], LOSSES)))
    figures.history(losses, "losses", tmp_path / "losses.png")
    drawn = image.imread(tmp_path / "all.png")
    colours = {tuple(round(255 * part) for part in pixel[:3]) for pixel in drawn[::2, ::2].reshape(-1, drawn.shape[2])}
    for width in (1, 2, 3, 4):
        shown = figures.WIDTH_COLOURS[width]
        assert tuple(int(shown[place : place + 2], 16) for place in (1, 3, 5)) in colours
    assert image.imread(tmp_path / "losses.png").shape[0] < drawn.shape[0]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither decisions nor losses"):
        figures.history(History.of(read(runs.write(tmp_path / "run.jsonl", []))), "empty", tmp_path / "run.png")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

PROBE = """
<body style="margin:0">{frames}<pre id="said"></pre><script>
onload = () => {{
  document.getElementById("said").textContent = [...document.querySelectorAll("iframe")].map(frame => {{
    const doc = frame.contentDocument, sums = [...doc.querySelectorAll("summary")];
    const before = doc.querySelectorAll("details[open]").length;
    sums.forEach(one => {{ one.focus(); if (doc.activeElement === one) one.click(); }});
    const opened = doc.querySelectorAll("details[open]").length - before;
    const wide = doc.documentElement.scrollWidth - frame.clientWidth;
    const size = parseFloat(getComputedStyle(doc.querySelector(".state")).fontSize);
    doc.querySelector("#changed").click();
    const left = sums.filter(one => one.offsetParent !== null).length;
    return `${{wide}} ${{opened}} ${{left}} ${{size >= 11}}`;
  }}).join("|");
}};
</script></body>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine; install chromium to run this")
class TestInABrowser:
    def chromium(self, *options: str) -> str:
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    def test_it_fits_a_phone_and_a_desk_and_opens(self, tmp_path: Path) -> None:
        """No sideways scrolling, every tensor takes focus and opens, the filter leaves what changed."""
        shown = html.escape(page(tmp_path), quote=True)
        frames = "".join(f'<iframe srcdoc="{shown}" width="{width}" height="800"></iframe>' for width in (360, 1280))
        (tmp_path / "probe.html").write_text(PROBE.format(frames=frames))
        dumped = self.chromium("--dump-dom", "--window-size=1700,900", f"file://{tmp_path}/probe.html")
        said = re.search(r'<pre id="said">([^<]*)</pre>', dumped)
        assert said is not None, dumped[-500:]
        assert said[1] == "0 2 1 true|0 2 1 true"

    def test_it_follows_the_colour_scheme(self, tmp_path: Path) -> None:
        from matplotlib import image

        (tmp_path / "run.html").write_text(page(tmp_path))
        corners = {}
        for scheme, setting in {"light": 1, "dark": 0}.items():
            shot = tmp_path / f"{scheme}.png"
            self.chromium(
                f"--blink-settings=preferredColorScheme={setting}",
                f"--screenshot={shot}",
                "--window-size=800,600",
                f"file://{tmp_path}/run.html",
            )
            corners[scheme] = [round(255 * part) for part in image.imread(shot)[0, 0, :3]]
        assert corners == {"light": [255, 255, 255], "dark": [0x11, 0x16, 0x1D]}
