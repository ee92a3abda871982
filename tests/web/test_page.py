"""The page in a real browser, and the server under load; both with networks that were really trained."""

import concurrent.futures
import html
import json
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_explorer import bomb, encoded
from test_server import call

from menet.web import Handler, Server, render
from menet.web.explorer import Explorer, Grid, Networks, static_answers
from menet.web.workers import Limits, workers

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}

pytestmark = pytest.mark.slow

# Drives the page in a frame of the same origin and reports to the test; a headless window is never narrower than
# 500 pixels, a frame is.
DRIVER = """<!doctype html><meta charset="utf-8">
<body style="margin:0"><iframe id="frame" src="SOURCE" style="border:0;width:WIDTHpx;height:HEIGHTpx"></iframe>
<script>
const log = [], errors = [];
const report = found => fetch("/found", {method: "POST", headers: {"Content-Type": "application/json"},
  body: JSON.stringify({...found, errors})});
const sleep = time => new Promise(done => setTimeout(done, time));
addEventListener("load", async () => {
  const inner = document.getElementById("frame").contentWindow, $ = id => inner.document.getElementById(id);
  inner.addEventListener("error", event => errors.push(event.message));
  inner.addEventListener("securitypolicyviolation", event => errors.push("policy: " + event.blockedURI));
  const until = async (what, test) => {
    for (let i = 0; i < 6000; i++) { if (test()) return; await sleep(50); }
    throw new Error("waited in vain for " + what + "; the page says: " + $("message").textContent);
  };
  const move = (id, value, kind) => {
    $(id).value = value;
    $(id).dispatchEvent(new inner.Event(kind || "input"));
  };
  const wide = () => {
    const root = inner.document.documentElement;
    return [...inner.document.querySelectorAll("body *")].filter(one => {
      const box = one.getBoundingClientRect();
      return box.width && box.right > root.clientWidth + 1;
    }).map(one => one.outerHTML.slice(0, 100));
  };
  try { await report(await (async () => { SCRIPT })()); }
  catch (error) { await report({failed: String(error)}); }
});
</script>"""

STORY = """
  const found = {wide: {}};
  await until("a first estimate", () => $("estimate").src.startsWith("data:"));
  found.samples = $("samples").querySelectorAll("button").length;
  const first = $("estimate").src;
  move("p", 0.2);
  await until("another estimate", () => $("estimate").src !== first);
  const second = $("estimate").src;
  move("estimator", "usvt", "change");
  await until("the estimate of another estimator", () => $("estimate").src !== second);
  found.facts = $("facts").textContent; found.help = $("estimator-help").textContent;
  found.milliseconds = [];
  for (let i = 1; i <= 8; i++) {
    const before = $("estimate").src;
    move("p", 0.2 + i / 20);
    await until("a moved slider", () => $("estimate").src !== before);
    found.milliseconds.push(Number($("facts").dataset.milliseconds));
  }
  found.wide.reconstruct = wide();

  const pixels = inner.document.createElement("canvas");
  pixels.width = 40; pixels.height = 30;
  pixels.getContext("2d").fillRect(5, 5, 20, 10);
  const blob = await new Promise(done => pixels.toBlob(done));
  const own = new inner.DataTransfer();
  own.items.add(new inner.File([blob], "own.png", {type: "image/png"}));
  const before = $("original").src;
  $("file").files = own.files;
  $("file").dispatchEvent(new inner.Event("change"));
  await until("the uploaded image", () => $("original").src !== before && $("original").naturalWidth === 40);
  found.uploaded = [$("original").naturalWidth, $("original").naturalHeight];
  const bad = new inner.DataTransfer();
  bad.items.add(new inner.File(["no image"], "bad.png", {type: "image/png"}));
  $("file").files = bad.files;
  $("file").dispatchEvent(new inner.Event("change"));
  await until("a refusal", () => $("message").textContent.includes("not an image"));
  found.refusal = $("message").textContent;

  $("samples").querySelector("button").click();
  $("tab-attack").click();
  await until("an attack", () => !$("attacked").hidden && !$("run").disabled);
  found.outcome = $("outcome").textContent; found.bars = $("defended").children.length;
  const adversarial = $("adversarial").src;
  move("epsilon", 0.4); move("epsilon", 0.4, "change");
  await until("a stronger attack", () => $("adversarial").src !== adversarial && !$("run").disabled);
  found.stronger = $("outcome").textContent;
  const pgd = $("adversarial").src;
  move("kind", "bpda", "change");
  await until("another attack", () => $("adversarial").src !== pgd && !$("run").disabled);
  found.clean_differs = $("clean").src !== $("adversarial").src;
  found.wide.attack = wide();

  $("tab-steps").click();
  found.steps = Number($("step").max);
  const last = $("step-image").src;
  move("step", 0);
  found.step_moves = $("step-image").src !== last && $("step-image").src === $("clean").src;
  $("play").click();
  await until("the end of the play", () => $("play").textContent === "Play");
  found.played = Number($("step").value);
  found.wide.steps = wide();

  $("tab-certificate").click();
  await until("a certificate", () => $("held").dataset.painted === "0");
  found.radius = $("radius").textContent;
  const box = $("canvas").getBoundingClientRect();
  const place = {clientX: box.left + 3, clientY: box.top + 3, pointerId: 1, bubbles: true};
  $("canvas").dispatchEvent(new inner.PointerEvent("pointerdown", place));
  await until("a painted pixel", () => $("held").dataset.painted === "1");
  move("painted", 12, "change");
  await until("twelve painted pixels", () => $("held").dataset.painted === "12");
  found.held = $("held").textContent;
  found.wide.certificate = wide();
  found.requests = inner.performance.getEntriesByType("resource").map(one => one.name)
    .filter(name => !name.startsWith("data:") && !name.startsWith(location.origin));
  return found;
"""

EXPORTED = """
  const found = {wide: {}};
  await until("a first estimate", () => $("estimate").src.startsWith("data:"));
  const first = $("estimate").src;
  move("p", 0);
  await until("another estimate", () => $("estimate").src !== first);
  $("tab-attack").click();
  await until("an attack", () => !$("attacked").hidden);
  found.outcome = $("outcome").textContent;
  const weak = $("adversarial").src;
  move("epsilon", 0, "change");
  await until("another budget", () => $("adversarial").src !== weak);
  $("tab-steps").click();
  found.steps = Number($("step").max);
  $("tab-certificate").click();
  await until("a certificate", () => $("held").dataset.painted === "0");
  move("painted", 2, "change");
  await until("painted pixels", () => $("held").dataset.painted === "10");
  found.message = $("message").textContent;
  found.wide.certificate = wide();
  found.requests = inner.performance.getEntriesByType("resource").map(one => one.name)
    .filter(name => !name.startsWith("data:"));
  return found;
"""


class Driven(Handler):
    """The server with a page that drives the page, and a place to report to."""

    driver, found, arrived, exported = b"", [], threading.Event(), b""  # type: ignore[var-annotated]

    def do_GET(self) -> None:
        pages = {"/driver": Driven.driver, "/exported": Driven.exported}
        if self.path in pages:
            self._reply(HTTPStatus.OK, pages[self.path], "text/html; charset=utf-8")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        if self.path == "/found":
            self.unread = int(self.headers["Content-Length"])
            Driven.found.append(json.loads(self._body(1 << 20)))
            self._reply(HTTPStatus.OK, b"{}", "application/json")
            Driven.arrived.set()
        else:
            super().do_POST()


@pytest.fixture(scope="module")
def server(networks: Networks) -> Iterator[Server]:
    one = Server(("127.0.0.1", 0), workers(networks, Limits(seconds=120)), Driven)
    threading.Thread(target=one.serve_forever, daemon=True).start()
    yield one
    one.shutdown()
    one.close()


def chromium(profile: Path, *options: str) -> list[str]:
    return [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", f"--user-data-dir={profile}", *options,
    ]  # fmt: skip


def driven(server: Server, script: str, width: str, source: str, folder: Path) -> dict[str, Any]:
    wide, high = WIDTHS[width]
    text = DRIVER.replace("SCRIPT", script).replace("SOURCE", source).replace("WIDTH", str(wide))
    Driven.driver = text.replace("HEIGHT", str(high)).encode()
    Driven.found, Driven.arrived = [], threading.Event()
    environment = {**os.environ, "HOME": str(folder)}
    process = subprocess.Popen(
        [
            *chromium(folder / "profile"),
            "--window-size=1400,1000",
            "--remote-debugging-port=0",
            server.url + "driver",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        assert Driven.arrived.wait(240), "the browser reported nothing"
    finally:
        process.terminate()
        process.wait(30)
    found: dict[str, Any] = Driven.found[0]
    assert "failed" not in found, found
    assert found["errors"] == []
    assert found["requests"] == []
    assert all(tab == [] for tab in found["wide"].values()), found["wide"]
    return found


@BROWSER
@pytest.mark.parametrize("width", WIDTHS)
def test_the_whole_story_in_a_browser(server: Server, width: str, tmp_path: Path) -> None:
    found = driven(server, STORY, width, "/", tmp_path)
    assert found["samples"] >= 8
    assert "Approximate rank" in found["facts"]
    assert "dB PSNR" in found["facts"]
    assert "singular value thresholding" in found["help"]
    assert found["uploaded"] == [40, 30]
    assert "please choose" in found["refusal"]
    assert found["outcome"] != found["stronger"]
    assert found["bars"] == 10
    assert found["clean_differs"]
    assert found["step_moves"]
    assert found["played"] == found["steps"] >= 15
    assert "certified" in found["radius"].lower()
    assert "12 pixels repainted" in found["held"]


@BROWSER
def test_the_exported_page_needs_no_server(networks: Networks, server: Server, tmp_path: Path) -> None:
    grid = Grid((0.3, 0.5), ("nuclear-norm", "usvt"), (0.1, 0.2), (0, 3, 10), steps=3, draws=2, frames=3)
    page = render(static_answers(Explorer(networks), grid))
    Driven.exported = page.encode()
    found = driven(server, EXPORTED, "phone", "/exported", tmp_path)
    assert found["message"] == ""
    assert found["steps"] == 2
    # From a file, with every host unreachable: the first picture is drawn by the script.
    file = tmp_path / "page.html"
    file.write_text(page)
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [*chromium(tmp_path / "offline"), offline, "--enable-logging=stderr", "--dump-dom", file.as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert "Approximate rank" in html.unescape(done.stdout)
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []


def test_two_hundred_requests_at_once_leave_the_server_standing(server: Server) -> None:
    """Twenty at a time, half of them hostile: every good one is answered, no error 500, memory bounded."""
    photo = Image.effect_noise((600, 400), 60).convert("RGB")
    jpeg = encoded(photo, "JPEG")
    octets = {"Content_Type": "application/octet-stream"}
    kinds: list[tuple[int, str, Any, dict[str, str]]] = [
        (200, "/api/upload", jpeg, octets),
        (200, "/api/reconstruct", {"image": "photo-roof", "p": 0.4}, {}),
        (200, "/api/reconstruct", {"image": "photo-petals", "p": 0.7, "estimator": "usvt", "draws": 5}, {}),
        (200, "/api/about", {}, {}),
        (413, "/api/upload", bytes(9 << 20), octets),
        (400, "/api/upload", jpeg[: len(jpeg) // 2], octets),
        (400, "/api/upload", b"#!/bin/sh\necho no image\n", octets),
        (400, "/api/upload", bomb(60_000, 60_000), octets),
        (400, "/api/upload", bomb(4_800, 4_800), octets),
        (400, "/api/reconstruct", {"image": "photo-roof", "draws": 10**6}, {}),
    ]
    requests = kinds * 20
    random.Random(0).shuffle(requests)
    for lane in server.lanes:
        lane.start()
    before = memory_of(server)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda one: call(server, one[1], one[2], **one[3]), requests))
    wrong = [
        (one[:2], status, answer)
        for one, (status, answer) in zip(requests, found, strict=True)
        if one[0] != status
    ]
    assert wrong == []
    # What a decoder of 24 million pixels takes, and not 110 times as much.
    assert memory_of(server) - before < 400 << 20


def memory_of(server: Server) -> int:
    """Bytes that the server and its workers have at most taken; 0 where the system does not say."""
    total = 0
    for pid in (os.getpid(), *(lane.pid for lane in server.lanes)):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return 0
        total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    return total
