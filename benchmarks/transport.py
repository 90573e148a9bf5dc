# SPDX-License-Identifier: Apache-2.0
"""Transport alone: steps/s from environment servers to a learner that does nothing with them.

Mock environments, which cost next to nothing, in processes of their own; the real sockets, pool,
batcher and queue; a policy that answers zeros. What is left is the cost of moving steps.

python benchmarks/transport.py [--env Mock] [--envs_per_stream 1 16] [--seconds 5] [--repeats 3]
"""

from __future__ import annotations

import argparse
import functools
from contextlib import ExitStack, closing
from pathlib import Path

from figures import print_table, write_json

from torchbeast.bench.sample import Measure
from torchbeast.bench.transport import transport
from torchbeast.bench.turns import in_turn
from torchbeast.core.distributions import distribution_for
from torchbeast.runtime.env_plan import ServerPlan
from torchbeast.runtime.environment import make_environment
from torchbeast.runtime.flags import available_cores
from torchbeast.runtime.session import raise_failure
from torchbeast.runtime.supervisor import Supervisor
from torchbeast.sources.poly import PolySourceConfig

UNROLL_LENGTH = 20
NUM_STREAMS = 2  # of each server


def main() -> None:
    arguments, supervisor = _arguments(), Supervisor()
    with ExitStack() as opened:
        runs = {}
        for num_envs in arguments.envs_per_stream:
            stage = _stage(arguments, num_envs, supervisor, opened)
            runs[_name(arguments, num_envs)] = functools.partial(stage, arguments.seconds)
        samples = in_turn(runs, arguments.repeats)
    raise_failure(supervisor.failure)
    figures = {name: [each.steps_per_second for each in found] for name, found in samples.items()}
    costs = {name: [each.cpu_us for each in found] for name, found in samples.items()}
    print_table(figures, "steps/s")
    print_table(costs, "CPU us a step")
    write_json(arguments.json, arguments, steps_per_second=figures, cpu_us_a_step=costs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="Mock")
    parser.add_argument("--envs_per_stream", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--num_servers", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=5.0, help="measured, after a warm-up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def _name(arguments: argparse.Namespace, envs_per_stream: int) -> str:
    return (
        f"{envs_per_stream} environments in each of {NUM_STREAMS * arguments.num_servers} streams"
    )


def _stage(
    arguments: argparse.Namespace, num_envs: int, supervisor: Supervisor, opened: ExitStack
) -> Measure:
    """Each rollout of a stream is a batch."""
    plans = [ServerPlan(NUM_STREAMS, num_envs)] * arguments.num_servers
    config = PolySourceConfig(batch_size=num_envs, unroll_length=UNROLL_LENGTH)
    with closing(make_environment(arguments.env, 1)) as env:
        zero_action = distribution_for(env.action_space).zero_action
    return opened.enter_context(transport(arguments.env, plans, config, zero_action, supervisor))


if __name__ == "__main__":
    main()
