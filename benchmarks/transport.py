# SPDX-License-Identifier: Apache-2.0
"""Measures transport alone: steps/s from environment servers to a learner that drops every batch.

Fixed environments, which cost almost nothing, run in processes of their own; sockets, pool, batcher
and queue are the real ones; the policy returns zeros. Interleaved with it is gRPC alone with
messages of the same size (bare_grpc.cc), an upper bound for every transport over gRPC. Build it by

    cmake -S . -B build/bare -DTORCHBEAST_PYTHON=OFF -DTORCHBEAST_BENCHMARKS=ON
    cmake --build build/bare --target bare_grpc

python benchmarks/transport.py [--flows one sixteen few many] [--bare build/bare/bare_grpc]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import fixed_env
from bench.sample import Measure
from bench.transport import transport
from figures import bare_grpc, interleaved, print_table, write_json

from torchbeast import envs
from torchbeast.collect.config import RolloutConfig
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.run_folder import raise_failure
from torchbeast.servers.config import PipelineConfig
from torchbeast.servers.env_servers import ServerPlan

UNROLL_LENGTH = 20
FRAME_BYTES = 84 * 84


@dataclass(frozen=True)
class Flow:
    """A set of streams with the same load."""

    name: str
    envs_per_stream: int
    num_streams: int  # of all servers together
    newest_only: (
        bool  # each frame is sent once and stacks are rebuilt; else stacks of four are sent
    )

    @property
    def message_bytes(self) -> int:
        """Bytes of the observations in a message."""
        return self.envs_per_stream * FRAME_BYTES * (1 if self.newest_only else 4)


FLOWS = {
    "one": Flow("1 environment a stream, whole stacks", 1, 4, newest_only=False),
    "sixteen": Flow("16 environments a stream, newest frames", 16, 4, newest_only=True),
    "few": Flow("16 streams of 1 environment, whole stacks", 1, 16, newest_only=False),
    "many": Flow("256 streams of 1 environment, whole stacks", 1, 256, newest_only=False),
}


def main() -> None:
    arguments, supervisor = _arguments(), Supervisor()
    costs: dict[str, list[float]] = {}
    with ExitStack() as opened:
        runs = {}
        for flow in (FLOWS[name] for name in arguments.flows):
            measure = opened.enter_context(_transport(flow, arguments.num_servers, supervisor))
            costs[flow.name] = []
            runs[flow.name] = functools.partial(_rate, measure, arguments, costs[flow.name])
            if arguments.bare is not None:
                bare = opened.enter_context(
                    bare_grpc(
                        arguments.bare, flow.message_bytes, arguments.num_servers, flow.num_streams
                    )
                )
                runs[f"gRPC alone, {flow.name}"] = functools.partial(
                    _bare_rate, bare, flow, arguments.seconds
                )
        figures = interleaved(runs, arguments.repeats)
    raise_failure(supervisor.failure)
    print_table(figures, "steps/s")
    print_table(costs, "CPU us per step")
    write_json(arguments.json, arguments, steps_per_second=figures, cpu_us_a_step=costs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flows", nargs="+", choices=list(FLOWS), default=list(FLOWS))
    parser.add_argument(
        "--bare", type=Path, help="the program bare_grpc; without it gRPC alone is not measured"
    )
    parser.add_argument("--num_servers", type=int, choices=(1, 2, 4), default=2)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="length of one run, after a warm-up"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def _rate(measure: Measure, arguments: argparse.Namespace, costs: list[float]) -> float:
    sample = measure(arguments.seconds)
    costs.append(sample.cpu_us)
    return sample.steps_per_second


def _bare_rate(bare: Callable[[float], float], flow: Flow, seconds: float) -> float:
    return bare(seconds) * flow.envs_per_stream


@contextmanager
def _transport(flow: Flow, num_servers: int, supervisor: Supervisor) -> Iterator[Measure]:
    """Yields the measurement of a flow, in which each rollout of a stream is a batch."""
    plans = [ServerPlan(flow.num_streams // num_servers, flow.envs_per_stream)] * num_servers
    rollouts = RolloutConfig(batch_size=flow.envs_per_stream, unroll_length=UNROLL_LENGTH)
    settings = rollouts, PipelineConfig()
    # Fixed environments: the bare program also sends the same message again and again.
    served = fixed_env.like(envs.EnvSpec("PongNoFrameskip-v4" if flow.newest_only else "Mock"))
    with closing(envs.make(served, 1)) as env:
        zero_action = distribution_for(env.action_space).zero_action
    with transport(served, plans, *settings, zero_action, supervisor) as measure:
        yield measure


if __name__ == "__main__":
    main()
