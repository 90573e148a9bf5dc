# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/how-to/scale.md from the CSV files that `scale.py` has written.

PYTHONPATH=. python benchmarks/scale_page.py
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.scaling import COSTS, Load, Network, coefficients, cost_us, load_of, measured, predict

PAGE = Path(__file__).parents[1] / "docs/how-to/scale.md"
Rows = Sequence[Mapping[str, str]]

_CORES, _LINK = 16, 10e9 / 8  # of the learner's machine in the last table
_BUSY = 4  # load average above which results are not kept for good
_MOST_LEARNERS = 16  # that the table recommends


def main() -> None:
    """Replaces what is between the two comments that name a table."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        assert begin and end, f"{PAGE} has no place for the table {name}"
        text = "\n".join([before + begin, *table(), "", end + after])
    PAGE.write_text(text, encoding="utf-8")


def _rows(part: str) -> Rows:
    return measured(COSTS.with_name(f"{part}.csv"))


def _named(model: str) -> str:
    return f"`{model.rpartition(':')[2]}`"


def _head(*columns: str) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def conditions() -> Iterator[str]:
    """Returns where the results were measured, and whether other programs disturbed them."""
    where = COSTS.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    load = re.search(r"load average (\d+)", where)
    yield f"Measured on {where}."
    if load is not None and int(load[1]) > _BUSY:
        yield "Other programs used the cores meanwhile, so all of these numbers are preliminary."


def cost() -> Iterator[str]:
    """Returns the cost of a step by streams and environments per stream."""
    plain = [
        r for r in _rows("cost") if r["tls"] == r["dials_in"] == "0" and r["frame_bytes"] == "7056"
    ]
    sizes = sorted({int(row["envs_per_stream"]) for row in plain})
    each = [f"{size} environment{'s' * (size > 1)} a stream" for size in sizes]
    yield from _head("streams", *each, "threads", "MB")
    for streams in sorted({int(r["streams"]) for r in plain if r["envs_per_stream"] == "1"}):
        of_size = {int(r["envs_per_stream"]): r for r in plain if int(r["streams"]) == streams}
        cells = [
            f"{float(of_size[size]['learner_us']):.0f} us" if size in of_size else ""
            for size in sizes
        ]
        usual = of_size.get(16, of_size[sizes[0]])
        yield _line(f"{streams:,}", *cells, usual["threads"], usual["megabytes"])
    most = max(plain, key=lambda row: int(row["steps_per_second"]))
    yield ""
    yield (
        f"{most['streams']} streams of {most['envs_per_stream']} environments that offer more than "
        f"a learner takes in make {int(most['steps_per_second']):,} steps/s."
    )


def formula() -> Iterator[str]:
    """Returns the coefficients of the formula."""
    yield from _head("CPU us", "A, a message", "B, a step", "C, a kB", "A with TLS", "C with TLS")
    named = {"learner_us": "the learner's process", "python_us": "its threads that run Python"}
    for column, what in named.items():
        a, b, c, a_tls, c_tls = coefficients(column)
        yield _line(what, *(f"{value:.1f}" for value in (a, b, c, a + a_tls, c + c_tls)))
    errors = [
        abs(cost_us(load_of(row), "learner_us") / float(row["learner_us"]) - 1)
        for row in _rows("cost")
    ]
    yield ""
    middle, most = (f"{100 * value:.0f} %" for value in (statistics.median(errors), max(errors)))
    yield f"It differs from {len(errors)} measured costs by {middle} in the median, {most} at most."


def rate() -> Iterator[str]:
    """Returns predictions beside measurements."""
    yield from _head(
        "network",
        "streams",
        "learners",
        "steps/s",
        "predicted",
        "error",
        "limit",
        "us of CPU",
        "predicted",
    )
    for row in _rows("rate"):
        streams = f"{int(row['streams']):,} of {row['envs_per_stream']}" + ", TLS" * int(row["tls"])
        rate, predicted = int(row["steps_per_second"]), int(row["predicted"])
        yield _line(
            _named(row["model"]),
            streams,
            row["learners"],
            f"{rate:,}",
            f"{predicted:,}",
            f"{predicted / rate - 1:+.0%}".replace("%", " %"),
            row["limit"],
            f"{float(row['learner_us']):.0f}",
            f"{float(row['predicted_us']):.0f}",
        )


def recovery() -> Iterator[str]:
    """Returns the seconds until all play."""
    rows = _rows("recovery")
    what = f"{int(rows[0]['streams']):,} hosts that dial in with TLS"
    yield from _head(what, "seconds until all are played")
    for row in rows:
        yield _line(row["after"], row["seconds"])


def weights() -> Iterator[str]:
    """Returns the cost of an update of the weights."""
    yield from _head("network", "MB", "publishing", "loading, in each inference thread")
    for row in _rows("weights"):
        times = (f"{int(row[name]):,} us" for name in ("publish_us", "load_us"))
        yield _line(_named(row["model"]), row["megabytes"], *times)


def what_to_run() -> Iterator[str]:
    """Returns what 1 to 1,000 hosts make with a learner of 16 cores."""
    network = {row["model"]: _network(row) for row in _rows("rate")}["shallow"]
    yield from _head("hosts", "they offer", "what to run", "one learner makes", "its limit")
    for hosts in (1, 10, 100, 1000):
        # 1.2 ms for a step of Pong, on each of 16 cores.
        pong = Load(streams=16 * hosts, envs_per_stream=8, frame_bytes=7056, step_s=0.0096)
        yield _advice(f"{hosts:,} of 16 cores, 128 games of Pong each", pong, network, hosts)
    for hosts in (1, 10, 100, 1000):
        slow = Load(streams=hosts, envs_per_stream=1, frame_bytes=28_224, step_s=0.1)
        yield _advice(f"{hosts:,} with one environment of 100 ms a step", slow, network, hosts)


def _network(row: Mapping[str, str]) -> Network:
    inference, learning = float(row["inference_us"]), float(row["learning_us"])
    threads = _CORES // 4
    return Network(
        inference_us=inference, learning_us=learning, inference_rate=threads * 1e6 / inference
    )


def _advice(what: str, load: Load, network: Network, hosts: int) -> str:
    found = predict(load, network, _CORES, link_bytes=_LINK)
    offered, rate = found.limits["environments"], found.steps_per_second
    learners = max(1, math.ceil(offered / rate - 0.1))
    most = math.ceil(hosts / learners)
    run = "one learner, `--listen`"
    if learners > _MOST_LEARNERS:
        per = "host" if most == 1 else f"{most:,} hosts"
        run = f"learners with GPUs; on CPUs one per {per}"
    elif learners > 1:
        run = f"{learners} learners, each with up to {most:,} of the hosts"
    limit = "the environments" if found.limit == "environments" else found.limit
    return _line(what, f"{offered:,.0f} steps/s", run, f"{rate:,.0f} steps/s", limit)


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "conditions": conditions,
    "cost": cost,
    "formula": formula,
    "rate": rate,
    "recovery": recovery,
    "weights": weights,
    "what to run": what_to_run,
}


if __name__ == "__main__":
    main()
