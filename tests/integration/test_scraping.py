# SPDX-License-Identifier: Apache-2.0
"""Whole programs serve the metrics of their display and log to Prometheus."""

from __future__ import annotations

import signal

import pytest
from background import wait_for
from ports import free_port
from programs import LEARNING, Workshop
from scraping import scraped
from test_endings import PROCESSES, SMALL

from torchbeast.reporting.log_files import read_logs

pytest.importorskip("prometheus_client")


@pytest.mark.long
@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_a_running_learner_serves_what_its_log_has(workshop: Workshop, program: str) -> None:
    port = free_port()
    words = ["--env", "Catch", "--xpid", "a", "--total_steps", str(10**8), PROCESSES[program], "2"]
    words += [*SMALL, "--checkpoint_interval", "1", "--metrics_port", str(port)]
    run = workshop.start(program, *words)
    run.wait_for(LEARNING)
    wait_for(lambda: ("torchbeast_env_steps_total",) in scraped(port))  # follows that line
    first = scraped(port)
    wait_for(lambda: scraped(port)[("torchbeast_env_steps_total",)] > 2000)
    found = scraped(port)
    kind = "streams" if program == "polybeast" else "workers"
    assert found[(f"torchbeast_{kind}", "live")] == 2
    assert found[("torchbeast_target_env_steps",)] == 10**8
    assert found[("torchbeast_run_info", "a")] == 1
    assert -1 <= found[("torchbeast_mean_episode_return",)] <= 1
    wait_for(lambda: ("torchbeast_last_checkpoint_timestamp_seconds",) in scraped(port))
    totals = [key for key in first if key[0].endswith("_total")]
    assert len(totals) > 5 and all(found[key] >= first[key] for key in totals)
    run.send(signal.SIGINT)
    assert run.end() == 0, run.said
    assert f"Metrics are at http://127.0.0.1:{port}/metrics" in run.said
    with pytest.raises(OSError):
        scraped(port)
    row = next(row for row in read_logs(workshop.run_folder("a")) if row["step"] > 2000)
    assert {f"torchbeast_log {name}" for name in ("entropy", "total_loss")} <= {
        " ".join(key) for key in found
    }
    assert row["step"] == 40 * (row["_tick"] + 1), "an update is 40 steps"
    steps, updates = (found[(f"torchbeast_{name}_total",)] for name in ("env_steps", "updates"))
    assert abs(steps - 40 * updates) <= 40, "read between two updates"
