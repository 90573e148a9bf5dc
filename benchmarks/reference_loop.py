# SPDX-License-Identifier: Apache-2.0
"""The reference loop: one process that steps, infers and learns sequentially.

It has no transport and never waits, and uses the environments, networks, loss and optimiser of
PolyBeast and MonoBeast. Their distance to it is what their machinery costs, or what overlapping
gains.

python benchmarks/reference_loop.py [--model deep] [--num_envs 32] [--megabytes_at_once 2.7 0]
    [--repeats 3]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from figures import interleaved, print_table, write_json

from torchbeast import envs
from torchbeast.collect.config import RolloutConfig
from torchbeast.collect.rollout_buffers import BatchBuffer, SharedRollouts, SlotWriter
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.config import IMPALAConfig, StepConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.base.specs import ActorSpec, Precision
from torchbeast.core.envs.spaces import ActionSpace, ObservationSpace
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.fleets.system import available_cores, keep_freed_memory
from torchbeast.run.assemble import Assembled, LearnerConfig, assemble
from torchbeast.run.config import HardwareConfig

STAGES = ("environment", "inference", "learning")


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    loops = {_name(arguments, size): loop_of(arguments, size) for size in _sizes(arguments)}
    for loop in loops.values():
        next(loop)  # warm-up: the first update is slower
    runs = {name: functools.partial(_updates, loop, arguments) for name, loop in loops.items()}
    figures = interleaved(runs, arguments.repeats)
    print_table(figures, "steps/s")
    shares = {name: next(loop) for name, loop in loops.items()}
    for name, seconds in shares.items():
        steps = arguments.num_envs * arguments.unroll_length
        stages = ", ".join(f"{stage} {seconds[stage] / steps * 1e6:,.0f}" for stage in STAGES)
        print(f"{name}, us per step: {stages}")
    write_json(arguments.json, arguments, steps_per_second=figures, seconds_of_an_update=shares)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the settings of a loop from a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="PongNoFrameskip-v4")
    parser.add_argument("--model", default="deep")
    parser.add_argument("--use_lstm", action="store_true")
    parser.add_argument("--num_envs", type=int, default=32, help="also the rollouts per update")
    parser.add_argument("--unroll_length", type=int, default=20)
    parser.add_argument("--precision", nargs="+", default=["auto"])
    parser.add_argument("--megabytes_at_once", type=float, nargs="+", default=[2.7])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--updates", type=int, default=2, help="updates in one run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def _sizes(arguments: argparse.Namespace) -> list[tuple[Precision, float]]:
    return [(p, size) for p in arguments.precision for size in arguments.megabytes_at_once]


def _name(arguments: argparse.Namespace, size: tuple[Precision, float]) -> str:
    return f"{arguments.model}, {size[0]}, {size[1]:g} MB at once"


def _updates(loop: Iterator[dict[str, float]], arguments: argparse.Namespace) -> float:
    """Returns the steps/s of some updates."""
    began = time.perf_counter()
    for _ in range(arguments.updates):
        next(loop)
    steps: int = arguments.updates * arguments.num_envs * arguments.unroll_length
    return steps / (time.perf_counter() - began)


def loop_of(
    arguments: argparse.Namespace, size: tuple[Precision, float]
) -> Iterator[dict[str, float]]:
    """Runs the loop; yields the seconds of each update by stage."""
    env = envs.make(arguments.env, arguments.num_envs, num_threads=arguments.threads)
    keep_freed_memory("cpu")
    made = learner(
        ActorSpec(arguments.model, use_lstm=arguments.use_lstm),
        (env.observation_space, env.action_space, env.frame_stack),
        RolloutConfig(batch_size=arguments.num_envs, unroll_length=arguments.unroll_length),
        arguments.threads,
        *size,
    )
    agent, inside_of_operations = made.agent, torch.get_num_threads()
    spec = RolloutSpec(agent, made.algo.needs, arguments.unroll_length)
    slot = SharedRollouts(spec, arguments.num_envs, num_slots=1)
    batch = BatchBuffer(spec, arguments.num_envs, pin=False)
    loop = EnvLoop(env, agent.model, 1)
    for index in itertools.count():
        writer = SlotWriter(slot.slots[0], loop.acted.state, 0, index)
        seconds = _act(loop, agent, writer, arguments)
        before = time.perf_counter()
        batch.clear()
        batch.add(slot.slots[0], 0, arguments.num_envs)
        torch.set_num_threads(inside_of_operations)
        made.optimiser_step.update(batch.rollout())
        torch.set_num_threads(arguments.threads)
        yield seconds | {"learning": time.perf_counter() - before}


def learner(
    actor: ActorSpec,
    spaces: tuple[ObservationSpace, ActionSpace, int],
    rollouts: RolloutConfig,
    threads: int,
    precision: Precision,
    megabytes_at_once: float,
) -> Assembled:
    """Assembles a learner of IMPALA, without a GPU.

    spaces: observation space, action space and frame stack.
    """
    config = LearnerConfig(
        actor=actor,
        algo=IMPALA,
        algorithm=IMPALAConfig(reward_clipping="abs_one"),
        step=StepConfig(),
        total_steps=10**9,
        rollouts=rollouts,
        hardware=HardwareConfig(
            torch_threads=threads,
            precision=precision,
            megabytes_at_once=megabytes_at_once,
            disable_cuda=True,
        ),
    )
    return assemble(config, lambda spec: make_agent(spec, *spaces), PublishedWeights)


def _act(
    loop: EnvLoop, agent: Agent, writer: SlotWriter, arguments: argparse.Namespace
) -> dict[str, float]:
    """Collects one rollout of every environment; returns the seconds by stage."""
    inference = environment = 0.0
    writer.write(0, loop.row, loop.acted, 0)
    for t in range(1, arguments.unroll_length + 1):
        before = time.perf_counter()
        loop.act("sample")
        acted = time.perf_counter()
        loop.step()
        writer.write(t, loop.row, loop.acted, 0)
        inference += acted - before
        environment += time.perf_counter() - acted
    return {"inference": inference, "environment": environment}


if __name__ == "__main__":
    main()
