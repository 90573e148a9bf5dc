# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus: the newest metrics of a program, at http://HOST:PORT/metrics.

    main thread -- show() --> newest metrics <-- reads -- threads of the HTTP server, one a request

It only serves metrics that the display and the log have as well, under Prometheus' conventions:
names of totals end in _total, and totals start at 0 unless stated otherwise; shares are ratios, and
times are in seconds. docs/how-to/operations.md lists the metrics of a learner.
"""

from __future__ import annotations

import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from torchbeast.core.base.checks import require, setting
from torchbeast.errors import UsageError, started
from torchbeast.fleets.system import close_in_forks
from torchbeast.reporting.diagnosis import alive
from torchbeast.reporting.display import Shown

_log = logging.getLogger("torchbeast.metrics")

_LOOPBACK = "127.0.0.1"
_PREFIX = "torchbeast_"
_END_S = 5.0
_MOST_OPEN = 16  # connections at a time
_LONGEST_S = 10.0  # from connection to answer


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Metrics for Prometheus."""

    metrics_port: str | None = setting(None, "connection")
    """Serve metrics for Prometheus at http://HOST:PORT/metrics (pip install 'torchbeast[metrics]').
    With PORT alone, metrics are reachable only from this machine; with 0.0.0.0:PORT, from all its
    networks. Default: off."""

    def __post_init__(self) -> None:
        if self.metrics_port is not None:
            self.address()

    def address(self) -> tuple[str, int]:
        """Returns host and port."""
        host, _, port = str(self.metrics_port).rpartition(":")
        require(
            port.isdecimal() and 0 < int(port) < 65536,
            f"metrics_port must be PORT or HOST:PORT with a port of 1 to 65535, got "
            f"{self.metrics_port!r}",
        )
        return host.strip("[]") or _LOOPBACK, int(port)


@dataclass(frozen=True)
class Metric:
    """A metric, with one value, or one for each value of a label. NaN means unknown."""

    name: str  # without torchbeast_, and without _total of a counter
    help: str
    values: float | Mapping[str, float]  # by value of the label
    label: str = ""
    kind: Literal["gauge", "counter"] = "gauge"


def total(name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
    """Returns a metric that only grows."""
    return Metric(name, text, values, label, "counter")


class PrometheusEndpoint:
    """Serves the metrics that `show` was last called with. Any thread may call it."""

    def __init__(self) -> None:
        self._newest: Sequence[Metric] = ()

    def show(self, metrics: Sequence[Metric]) -> None:
        """Replaces the served metrics."""
        self._newest = tuple(metrics)

    @contextmanager
    def served(self, config: MetricsConfig) -> Iterator[PrometheusEndpoint]:
        """Serves until the block ends; does nothing without --metrics_port.

        Warns if the address cannot be used. Raises UsageError if the package is missing.
        """
        with ExitStack() as ending:
            if config.metrics_port is not None:
                _serve(config, self, ending)
            yield self

    def collect(self) -> Iterator[Any]:
        """Yields the metrics; prometheus_client calls it for every request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in self._newest:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            values = metric.values if isinstance(metric.values, Mapping) else {"": metric.values}
            labels = [metric.label] if metric.label else []
            family = kind(f"{_PREFIX}{metric.name}", metric.help, labels=labels)
            for value, number in values.items():
                if not math.isnan(number):
                    family.add_metric([value] if labels else [], number)
            yield family


def _serve(config: MetricsConfig, endpoint: PrometheusEndpoint, ending: ExitStack) -> None:
    """Starts the HTTP server, or warns."""
    try:
        from prometheus_client import CollectorRegistry, MetricsHandler
    except ImportError:
        raise UsageError(
            "metrics_port needs the Prometheus client: pip install 'torchbeast[metrics]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(endpoint)
    try:
        server = _Server(*config.address(), MetricsHandler.factory(registry))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        _log.warning(
            f"metrics cannot be served at {_shown(config)} ({why}), so this run serves none: use "
            "another metrics_port next time"
        )
        return
    thread = started(threading.Thread(target=server.serve_forever, name="metrics", daemon=True))
    ending.callback(thread.join, _END_S)
    ending.callback(server.server_close)
    ending.callback(server.shutdown)
    print(f"Metrics are at http://{_shown(config)}/metrics", flush=True)


class _Server(socketserver.ThreadingTCPServer):
    """Answers requests, a few at a time and each within a few seconds, so that connections of
    strangers leave the run the files that it has to open.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, host: str, port: int, handler: type) -> None:
        self._open: dict[Any, float] = {}  # connections, and when they began
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), handler)
        close_in_forks(self.socket)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._open) < _MOST_OPEN

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:  # twice a second
        for request, began in tuple(self._open.items()):
            if time.monotonic() - began > _LONGEST_S:
                with suppress(OSError):  # it has just ended
                    request.shutdown(socket.SHUT_RDWR)

    def close_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Is silent: the other side has left or was interrupted."""


def _shown(config: MetricsConfig) -> str:
    host, port = config.address()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def learner_metrics(shown: Shown) -> list[Metric]:
    """Returns the metrics of a run."""
    progress, status = shown.progress, shown.status
    since = "since the program started"
    return [
        Metric("run_info", "1, for the run.", {shown.run: 1.0}, "xpid"),
        total("env_steps", "Environment steps trained on, since the run began.", progress.step),
        total("updates", "Updates of the weights, since the run began.", shown.updates),
        total("episodes", "Episodes that have ended, since the run began.", progress.episodes),
        total("collected_env_steps", f"Environment steps {since}.", shown.collected),
        Metric("target_env_steps", "Environment steps of the whole run.", shown.total_steps),
        Metric("mean_episode_return", "Of the last episodes.", progress.mean_return()),
        Metric("mean_episode_length", "Of the last episodes, in steps.", progress.mean_length()),
        Metric(
            "learner_queue_rollouts",
            "Rollouts that wait for the learner.",
            status["learner_queue_size"],
        ),
        *_workers(shown),
        Metric(
            "last_checkpoint_timestamp_seconds",
            "Unix time of the last checkpoint of this process.",
            shown.saved_at,
        ),
        total("failed_checkpoints", f"Checkpoints not written, {since}.", shown.failed_saves),
        total(
            "stage_seconds",
            f"Seconds of all workers and learner threads, {since}.",
            shown.stage_seconds,
            "stage",
        ),
        Metric("log", "The values of the last row of logs.csv.", shown.row, "column"),
    ]


def _workers(shown: Shown) -> Iterator[Metric]:
    status = shown.status
    kind, live = alive(status)
    states = {"live": float(live), "lost": float(len(shown.lost_streams))}
    if "retired_streams" in status:
        states["retired"] = float(status["retired_streams"])
    yield Metric(kind, f"The {kind} by what they do now.", states, "state")
    for name, text in (
        ("lost_streams", "Lost streams, since the program started."),
        ("restarted_streams", "Replacements of a stream's failed environments."),
        ("replaced_workers", "Workers that were replaced, since the program started."),
    ):
        if name in status:
            yield total(name, text, status[name])
    if (fill := status.get("replay_fill")) is not None:
        yield Metric("replay_fill_ratio", "Fraction of the replay that is filled.", fill)
