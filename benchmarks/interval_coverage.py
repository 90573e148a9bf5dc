# SPDX-License-Identifier: Apache-2.0
"""Measures how often the 95 % intervals of `compare` contain the true value, as a table.

The runs of A and B have the same distribution of scores, so P(A > B) is 0.5, and every interval
without 0.5 is an error. docs/how-to/suite.md has the table (5 minutes).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from torchbeast.reporting import estimates

_RNG = np.random.default_rng(0)
_RESAMPLES = 500
_EXACT = 1_000_000  # runs for the true interquartile mean

Draw = Callable[[int], np.ndarray]
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda n: _RNG.normal(size=n),
    "lognormal": lambda n: _RNG.lognormal(size=n),
    "bimodal": lambda n: 0.3 * _RNG.normal(size=n) + 3 * (_RNG.random(n) < 0.5),
    "capped": lambda n: np.minimum(_RNG.normal(size=n), 0.5),  # a third reaches the maximum
}


def missed(draw: Draw, num_tasks: int, num_runs: int, pairs: int) -> tuple[float, float]:
    """Returns how often the interval of P(A > B), and A's of the interquartile mean, are wrong."""
    true_iqm = estimates.iqm([draw(_EXACT)])
    wrong = np.zeros(2)
    for _ in range(pairs):
        a, b = ([draw(num_runs) for _ in range(num_tasks)] for _ in "AB")
        drawn_a, drawn_b = (estimates.resampled(each, _RNG, _RESAMPLES) for each in (a, b))
        better = estimates.probability_of_improvement(drawn_a, drawn_b)
        low, high = estimates.interval(better, [*a, *b])
        low_a, high_a = estimates.interval(estimates.iqm(drawn_a), a)
        wrong += (not low <= 0.5 <= high, not low_a <= true_iqm <= high_a)
    found = wrong / pairs
    return float(found[0]), float(found[1])


def main() -> None:
    """Prints a row for every number of tasks and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000, help="of sets, for every number")
    pairs = parser.parse_args().pairs
    print(f"| tasks | runs of a task | wrong P(A > B): {', '.join(DISTRIBUTIONS)} | wrong IQM |")
    print("| --- | --- | --- | --- |")
    for num_tasks in (1, 5):
        for num_runs in (3, 5, 10, 20):
            rows = [missed(draw, num_tasks, num_runs, pairs) for draw in DISTRIBUTIONS.values()]
            cells = [
                ", ".join(f"{100 * share:.1f}" for share in each)
                for each in zip(*rows, strict=True)
            ]
            print(f"| {num_tasks} | {num_runs} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
