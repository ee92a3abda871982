"""The page in a real browser: nothing sticks out, no error, no request to anywhere."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from results_samples import certificate, records

from menet.evaluation import publish
from menet.report.board import write_board

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}

# A headless window is never narrower than 500 pixels, so the page is measured in frames of both widths. Their
# content is the page itself, unchanged, with its own policy on what it may load.
MEASURE = """
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const inner = frame.contentDocument, root = inner.documentElement;
    const wide = [...inner.querySelectorAll("body *")].filter(one => {
      const box = one.getBoundingClientRect();
      return box.width && box.right > root.clientWidth + 1 && !one.closest(".scroll");
    }).map(one => one.outerHTML.slice(0, 120));
    for (const one of inner.querySelectorAll(".scroll"))
      if (one.scrollWidth > one.clientWidth + 1) wide.push("a table scrolls: " + one.innerText.slice(0, 80));
    const images = [...inner.images];
    const texts = [...inner.querySelectorAll("h1,h2,h3,p,figcaption,td,th,summary")]
      .filter(one => one.offsetParent);
    const overlaps = [];
    for (let i = 1; i < texts.length; i++) {
      const a = texts[i - 1].getBoundingClientRect(), b = texts[i].getBoundingClientRect();
      if (a.right > b.left + 1 && b.right > a.left + 1 && a.bottom > b.top + 1 && b.bottom > a.top + 1)
        overlaps.push(texts[i - 1].innerText + " / " + texts[i].innerText);
    }
    found[frame.id] = {
      width: root.clientWidth, scroll: root.scrollWidth, wide, overlaps,
      images: images.length, broken: images.filter(one => !one.naturalWidth).length,
      requests: frame.contentWindow.performance.getEntriesByType("resource").map(one => one.name)
        .filter(name => !name.startsWith("data:")),
    };
  }
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


def browse(address: str, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", "--enable-logging=stderr", f"--user-data-dir={profile}", *options, address,
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(profile)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def console(output: str) -> list[str]:
    return [line for line in output.splitlines() if ":CONSOLE" in line]


def measured(whole: str, folder: Path) -> tuple[dict, list[str]]:
    frames = "".join(
        f'<iframe id="{name}" style="border:0;width:{width}px;height:{height}px" srcdoc="{html.escape(whole)}">'
        "</iframe>"
        for name, (width, height) in WIDTHS.items()
    )
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f'<!doctype html><meta charset="utf-8"><script>{MEASURE}</script><body>{frames}')
    done = browse(wrapper.as_uri(), folder / "profile", "--window-size=1400,1000", "--dump-dom")
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), console(done.stderr)


def test_nothing_sticks_out_overlaps_or_is_asked_for_outside(whole, tmp_path):
    found, errors = measured(whole, tmp_path)
    assert errors == []
    for name, (width, _) in WIDTHS.items():
        frame = found[name]
        assert frame["width"] in range(width - 20, width + 1)
        assert frame["scroll"] <= frame["width"], (name, frame["wide"][:3])
        assert frame["wide"] == [], name
        assert frame["overlaps"] == [], name
        assert frame["images"] >= 8
        assert frame["broken"] == 0
        assert frame["requests"] == []


def test_the_page_itself_logs_no_error(whole, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(whole)
    done = browse(file.as_uri(), tmp_path / "profile", "--dump-dom")
    assert "A report of planted numbers" in done.stdout
    assert console(done.stderr) == []


def test_the_measuring_notices_what_it_is_for(whole, tmp_path):
    bad = whole.replace(
        "<main>",
        '<main><div style="width:2000px">wide</div><p style="margin-bottom:-40px">one</p><p>two</p>'
        '<img src="http://127.0.0.1:9/outside.png"><script>console.error("planted")</script>',
        1,
    )
    found, errors = measured(bad, tmp_path)
    assert found["phone"]["scroll"] > 1900
    assert found["phone"]["overlaps"]
    assert found["phone"]["broken"] == 1
    # The page's own policy stops both, and says so.
    assert any("outside.png" in line for line in errors)


DRIVE = """
addEventListener("load", () => {
  const rows = () => [...document.querySelectorAll("tbody tr")].map(one => one.innerText);
  const found = {start: rows()};
  document.querySelector('th[data-key="robust"] button').click();
  found.reversed = rows();
  const threat = document.getElementById("threat");
  threat.value = "all"; threat.dispatchEvent(new Event("change"));
  found.all = rows();
  const select = document.getElementById("dataset");
  select.value = "cifar10"; select.dispatchEvent(new Event("change"));
  found.filtered = rows(); found.count = document.getElementById("count").innerText;
  document.querySelector("button.open").click();
  const more = document.querySelector("tr.more");
  found.opened = more.querySelector("ul").innerText;
  found.pictures = [...more.querySelectorAll("svg")].map(one => one.getAttribute("aria-label"));
  document.querySelector("button.open").click();
  found.closed = document.querySelector("tr.more") === null;
  found.requests = performance.getEntriesByType("resource").map(one => one.name);
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def board(tmp_path_factory) -> str:
    """The board of three planted models, one of them under two threat models."""
    folder = tmp_path_factory.mktemp("results")
    for number, (name, dataset) in enumerate({"a": "mnist", "b": "mnist", "c": "cifar10"}.items()):
        made = records(number, count=40)
        made.header["evaluation"]["dataset"]["name"] = dataset
        proven = {"certificate": certificate(number)} if name == "c" else {}
        other = {"weak": records(9, "weak", count=40, epsilon=0.05)} if name == "a" else {}
        publish(
            f"{dataset}/{name}", {"pgd": made, **other, **proven}, {"config": {"epochs": 2, "seed": 0}}, folder
        )
    write_board(folder)
    return (folder / "board.html").read_text(encoding="utf-8")


def test_the_board_sorts_filters_and_opens(board, tmp_path):
    file = tmp_path / "board.html"
    file.write_text(board.replace("</html>", f"<script>{DRIVE}</script></html>"))
    done = browse(file.as_uri(), tmp_path / "profile", "--dump-dom")
    assert console(done.stderr) == []
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    assert len(found["start"]) == 3, "of each dataset the threat model of most models"
    assert len(found["all"]) == 4
    assert found["reversed"] == found["start"][::-1]
    assert [("cifar10/c" in row) for row in found["filtered"]] == [True]
    assert found["count"] == "1 of 4 results"
    assert "40 examples" in found["opened"]
    assert found["closed"]
    assert found["pictures"] == ["certified accuracy by changed pixels", "robust accuracy by attack"]
    assert found["requests"] == []


def test_the_board_fits_a_desktop_and_a_phone(board, tmp_path):
    found, errors = measured(board, tmp_path)
    assert errors == []
    for name in WIDTHS:
        assert found[name]["scroll"] <= found[name]["width"], found[name]["wide"][:3]
        assert found[name]["requests"] == []
