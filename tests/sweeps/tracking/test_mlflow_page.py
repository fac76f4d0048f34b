"""MLflow's own page in a real browser: the link that we print opens a table with the best trial on top."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sweeps.tracking.mlflow import MlflowTracker
from tests.support.facilities import CHROMEDRIVER, CHROMIUM
from tests.support.tracking import attempt_in, client, measured, out_of_memory, rejected, runs, study_record
from train_entry.contract import AttemptDir

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1700,900"
).split()
LOOPBACK_ONLY = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves eight processes
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
READY_S = 90.0


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebDriver]:
    monkeypatch.setenv("SE_OFFLINE", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, LOOPBACK_ONLY, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(executable_path=str(CHROMEDRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def page_port(mlflow_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """`mlflow ui` on the tests' database."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", mlflow_uri]
    command += ["--port", str(port), "--workers", "1"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=os.environ | SERVER_ENVIRONMENT, stdout=log, stderr=log
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        yield port
    finally:
        server.terminate()
        server.wait(timeout=30)


def read_directly(url: str) -> bytes:
    """Request the page directly, past any proxy."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
        return bytes(answer.read())


def wait_for(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            read_directly(url)
            return
        except OSError:
            assert time.monotonic() < deadline, f"{url} did not answer within {READY_S} s"
            time.sleep(0.2)


@pytest.fixture
def tracker(mlflow_uri: str, tmp_path: Path) -> MlflowTracker:
    """Five trials; the fastest is neither the first nor the last."""
    tracker = MlflowTracker(mlflow_uri, tmp_path / "mlartifacts", study_record("page"))
    tracker.record(measured(0, tokens_per_s_per_gpu=900.0), attempt_in(tmp_path))
    tracker.record(out_of_memory(1), None)
    tracker.record(measured(2, tokens_per_s_per_gpu=10_000.0), None)
    tracker.record(measured(3, tokens_per_s_per_gpu=1200.0), None)
    tracker.record(rejected(4), None)
    return tracker


@pytest.mark.browser
def test_the_page_opens_on_throughput_memory_and_loss_with_the_fastest_trial_on_top(
    tracker: MlflowTracker, page_port: int, browser: WebDriver, tmp_path: Path
) -> None:
    browser.get(tracker.runs_url(page_port))
    wait_for_rows(browser, 5)
    browser.save_screenshot(str(tmp_path / "page.png"))

    headers, names = header_texts(browser), run_names(browser)

    metrics = [text for text in headers if text in ("tokens_per_s_per_gpu", "peak_gib", "loss", "step_s")]
    first = headers.index("tokens_per_s_per_gpu")
    assert headers[first : first + 3] == ["tokens_per_s_per_gpu", "peak_gib", "loss"], headers
    assert metrics == ["tokens_per_s_per_gpu", "peak_gib", "loss", "step_s"]
    assert names[:3] == ["0002 zero2", "0003 zero2", "0000 zero2"]


@pytest.mark.slow
def test_a_tracking_server_is_written_like_a_database(
    page_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tracker = MlflowTracker(f"http://127.0.0.1:{page_port}", tmp_path, study_record("by way of a server"))

    tracker.record(measured(0), attempt_in(tmp_path, steps=400))
    tracker.record(measured(0), AttemptDir(tmp_path / "attempt-1"))

    (run,) = runs(tracker.uri, "by way of a server")
    artifacts = client(tracker.uri).list_artifacts(run.info.run_id)
    assert run.data.metrics["by_step/loss"] == 5.0 / 400
    assert artifacts[0].path == "ds_config.json"
    assert "viewStateShareKey=shardsweep" in tracker.runs_url()


@pytest.mark.slow
def test_the_page_serves_artifacts_that_lie_beside_the_studies(
    tracker: MlflowTracker, mlflow_uri: str, page_port: int
) -> None:
    run = runs(mlflow_uri, "page")[0]

    url = f"http://127.0.0.1:{page_port}/get-artifact?path=spec.json&run_uuid={run.info.run_id}"

    assert b"tiny" in read_directly(url)


def wait_for_rows(browser: WebDriver, count: int) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, READY_S).until(lambda _: len(run_names(browser)) >= count)


def header_texts(browser: WebDriver) -> list[str]:
    """Return the cells from left to right, as displayed: the grid keeps them in another order."""
    return texts_by_position(browser, ".ag-header-cell", "x")


def run_names(browser: WebDriver) -> list[str]:
    return texts_by_position(browser, ".ag-row a[href*='/runs/']", "y")


def texts_by_position(browser: WebDriver, selector: str, axis: str) -> list[str]:
    script = """
        const seen = [...document.querySelectorAll(arguments[0])]
            .map(cell => [cell.getBoundingClientRect()[arguments[1]], cell.innerText.trim()]);
        return seen.filter(([at, text]) => text).sort((a, b) => a[0] - b[0]).map(([at, text]) => text);
    """
    return list(browser.execute_script(script, selector, axis))
