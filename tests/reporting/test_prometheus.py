# SPDX-License-Identifier: Apache-2.0
"""Metrics are served as Prometheus reads them, and the address is checked before a run begins."""

from __future__ import annotations

import dataclasses
import math
import re
import socket
import sys
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from background import SOON, a_fork, wait_for
from ports import free_port
from scraping import scraped

from torchbeast import polybeast_env
from torchbeast.collect.contract import LostStream
from torchbeast.errors import UsageError
from torchbeast.reporting import prometheus
from torchbeast.reporting.display import Progress, Shown
from torchbeast.reporting.prometheus import (
    Metric,
    MetricsConfig,
    PrometheusEndpoint,
    learner_metrics,
)

pytest.importorskip("prometheus_client")


def state_of_run(updates: int = 30, **status: float) -> Shown:
    usual = {"learner_queue_size": 3, "live_streams": 4, "collected_steps": 1500}
    lost = {"lost_streams": 2, "restarted_streams": 1, "retired_streams": 3}
    return Shown(
        run="mine",
        progress=Progress(step=1200, episodes=7, returns=deque([-0.5])),
        total_steps=9000,
        status=usual | lost | status,
        lost_streams=[LostStream("unix:a", 2.0)],
        updates=updates,
        stage_seconds={"environment": 5.5, "learning": 1.25},
        row={"entropy": 0.75, "mean_episode_return": math.nan},
        saved_at=1e9,
        failed_saves=1,
    )


def test_a_scrape_has_the_newest_metrics_under_their_names() -> None:
    port = free_port()
    with PrometheusEndpoint().served(MetricsConfig(metrics_port=str(port))) as metrics:
        assert scraped(port) == {}, "nothing is known yet"
        metrics.show(learner_metrics(state_of_run(updates=29)))
        metrics.show(learner_metrics(state_of_run()))
        found = scraped(port)
    assert found == {
        ("torchbeast_run_info", "mine"): 1,
        ("torchbeast_env_steps_total",): 1200,
        ("torchbeast_updates_total",): 30,
        ("torchbeast_episodes_total",): 7,
        ("torchbeast_collected_env_steps_total",): 1500,
        ("torchbeast_target_env_steps",): 9000,
        ("torchbeast_mean_episode_return",): -0.5,
        ("torchbeast_streams", "live"): 4,
        ("torchbeast_streams", "lost"): 1,
        ("torchbeast_streams", "retired"): 3,
        ("torchbeast_learner_queue_rollouts",): 3,
        ("torchbeast_lost_streams_total",): 2,
        ("torchbeast_restarted_streams_total",): 1,
        ("torchbeast_last_checkpoint_timestamp_seconds",): 1e9,
        ("torchbeast_failed_checkpoints_total",): 1,
        ("torchbeast_stage_seconds_total", "environment"): 5.5,
        ("torchbeast_stage_seconds_total", "learning"): 1.25,
        ("torchbeast_log", "entropy"): 0.75,
    }, "an unknown figure is left out"


def test_the_server_ends_with_the_run() -> None:
    port = free_port()
    for _ in range(2):  # the port is free again
        with PrometheusEndpoint().served(MetricsConfig(metrics_port=str(port))):
            scraped(port)
        with pytest.raises(OSError):
            scraped(port)


def test_strangers_open_few_connections_and_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_LONGEST_S", math.inf)
    port = free_port()
    with ExitStack() as opened, PrometheusEndpoint().served(MetricsConfig(metrics_port=str(port))):

        def stranger() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", port), SOON))

        def is_scraped() -> bool:
            with suppress(OSError):
                return scraped(port) == {}
            return False  # the last strangers have not quite gone

        silent = [stranger() for _ in range(prometheus._MOST_OPEN)]
        silent[0].sendall(b"GET /metrics HTTP/1.1\r\n")  # half a request
        assert ends(stranger()), "one too many"
        monkeypatch.setattr(prometheus, "_LONGEST_S", 0.1)
        assert all(map(ends, silent))
        monkeypatch.setattr(prometheus, "_LONGEST_S", math.inf)
        wait_for(is_scraped)


def test_a_fork_does_not_keep_the_port() -> None:
    port = free_port()
    with ExitStack() as run:
        run.enter_context(PrometheusEndpoint().served(MetricsConfig(metrics_port=str(port))))
        with a_fork():
            run.close()
            socket.create_server(("127.0.0.1", port)).close()


def ends(connection: socket.socket) -> bool:
    """Returns whether the other side closes the connection."""
    with suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_without_a_host_only_this_machine_is_served() -> None:
    config = MetricsConfig(metrics_port="9400")
    assert config.address() == ("127.0.0.1", 9400)
    assert MetricsConfig(metrics_port="0.0.0.0:9400").address() == ("0.0.0.0", 9400)
    assert MetricsConfig(metrics_port="[::1]:9400").address() == ("::1", 9400)


@pytest.mark.parametrize("wrong", ["", "0", "65536", "host", "host:", "-1", "1.5", "9400:host"])
def test_a_wrong_port_is_a_sentence(wrong: str) -> None:
    with pytest.raises(ValueError, match="metrics_port must be PORT or HOST:PORT"):
        MetricsConfig(metrics_port=wrong)


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host"])
def test_a_run_whose_metrics_cannot_be_served_warns_and_continues(
    host: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        with PrometheusEndpoint().served(MetricsConfig(metrics_port=address)) as metrics:
            metrics.show([])
    assert f"metrics cannot be served at {address} (" in caplog.text
    assert capsys.readouterr().out == ""


def test_without_the_package_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'torchbeast\[metrics\]'"):
        with PrometheusEndpoint().served(MetricsConfig(metrics_port=str(free_port()))):
            pass


def test_who_asks_for_none_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with PrometheusEndpoint().served(MetricsConfig()) as metrics:
        metrics.show([Metric(name="a", help="", values=1.0)])


def test_the_documented_metrics_are_those_that_are_served() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "operations.md").read_text(
        encoding="utf-8"
    )
    tables = page.partition("## Metrics")[2].partition("### What to watch")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| `torchbeast_")]
    documented = set(
        re.findall(r"`torchbeast_(\w+)", " ".join(row.split(" | ")[0] for row in rows))
    )
    actors = {"learner_queue_size": 3, "live_workers": 2, "replaced_workers": 1}
    mono = dataclasses.replace(state_of_run(), status=actors)
    servers = Mock(activity=dict, addresses=[], replaced=0)
    served = [
        *learner_metrics(state_of_run(replay_fill=0.5)),
        *learner_metrics(mono),
        *polybeast_env._metrics(servers, []),
    ]
    names = {m.name + ("_total" if m.kind == "counter" else "") for m in served}
    assert documented == names
