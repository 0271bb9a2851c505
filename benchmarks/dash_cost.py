"""What the dashboard costs a browser: `python benchmarks/dash_cost.py` prints one line of JSON.

The population view follows 64 networks of 4 slots that take 10 steps a second, for 30 seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import CDPSession, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from dash.planted_run import Plan, advance, begin, plant
from esper.runs.store import RunStore

SECONDS = 30
RATE = 10
"""Steps a second."""
SETTLED_MS = 3000
PLAN = Plan(networks=64, slots=4, steps=SECONDS * RATE, iterations=0, ended=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = plant(Path(folder) / "run", PLAN)
        words = [sys.executable, "-m", "esper", "dash", folder, "--no-browser", "--port", "0"]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().removeprefix("dashboard: ").strip()
            sys.stdout.write(f"{json.dumps(measured(address, store))}\n")
        finally:
            server.terminate()
            server.wait()


def measured(address: str, store: Path) -> dict[str, float]:
    with sync_playwright() as playwright, RunStore.open(store) as writer:
        for event in begin(PLAN, 1):
            writer.emit(event)
        writer.flush()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time, not waiting for a core
        loaded: list[int] = []
        page.on("requestfinished", lambda request: loaded.append(request.sizes()["responseBodySize"]))
        page.goto(f"{address}#/population?run=run")
        page.wait_for_selector("main canvas")
        page.wait_for_timeout(SETTLED_MS)
        processes = browser.new_browser_cdp_session()
        before, cpu, began = metrics(session), renderer_seconds(processes), time.monotonic()
        feed(writer, page)
        page.get_by_text(f"step {PLAN.steps - 1}").wait_for()
        after, wall = metrics(session), time.monotonic() - began
        cpu = renderer_seconds(processes) - cpu
        browser.close()
    return {
        "page_bytes": sum(loaded),
        "steps": PLAN.steps,
        "main_thread_cpu_seconds": round(after["TaskDuration"] - before["TaskDuration"], 3),
        "renderer_cpu_seconds": round(cpu, 3),
        "wall_seconds": round(wall, 3),
        "renderer_cpu_share": round(cpu / wall, 4),
        "js_heap_bytes": after["JSHeapUsedSize"],
    }


def feed(writer: RunStore, page: Page) -> None:
    """Take all steps, each when it is due."""
    began = time.monotonic()
    for step in range(PLAN.steps):
        for event in advance(PLAN, 1, step):
            writer.emit(event)
        left = began + (step + 1) / RATE - time.monotonic()
        page.wait_for_timeout(max(0.0, 1000 * left))


def renderer_seconds(session: CDPSession) -> float:
    """CPU time of the processes that show pages, in all their threads."""
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return sum(one["cpuTime"] for one in found if one["type"] == "renderer")


def metrics(session: CDPSession) -> dict[str, float]:
    found = session.send("Performance.getMetrics")["metrics"]
    return {one["name"]: one["value"] for one in found}


if __name__ == "__main__":
    main()
