# SPDX-License-Identifier: Apache-2.0
"""RayBeast: training on Ray, on one machine or on a cluster, without a compiler.

python -m torchbeast.raybeast --preset pong                   starts Ray on this machine
python -m torchbeast.raybeast --preset pong --address auto    uses this machine's cluster
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing

from torchbeast.cli import command_line
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.collect.contract import LearnerInfo
from torchbeast.collect.rollout_buffers import slot_bytes
from torchbeast.collect.source import FleetSource
from torchbeast.collect.weights import SharedWeights
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.envs.env_process import EnvProcess
from torchbeast.errors import EXIT_DONE
from torchbeast.fleets.supervisor import end_program
from torchbeast.fleets.system import check_alone
from torchbeast.fleets.waiting import say
from torchbeast.on_ray.config import Room, check_object_store, num_workers
from torchbeast.on_ray.fleet import RayFleet
from torchbeast.reporting.diagnosis import RunFacts
from torchbeast.reporting.run_folder import Session, session
from torchbeast.run.assemble import precision
from torchbeast.run.learner_run import DescribedEnv, LearnerRun

PROGRAM = "raybeast"
MODEL_FOR_IMAGES = "shallow"  # like the first RayBeast without --use_resnet


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    return command_line.main(RayBeastFlags, PROGRAM, argv, run)


def run(flags: RayBeastFlags) -> int:
    """Trains or evaluates, depending on --mode."""
    check_alone(PROGRAM)
    if flags.command.mode != "train":
        return flags.test_run(flags.environment.asked)
    with session(flags.run.folder, command_line.flatten(flags)) as opened, ExitStack() as ending:
        train(flags, opened, ending)
    return EXIT_DONE


def train(flags: RayBeastFlags, opened: Session, ending: ExitStack) -> None:
    """Trains until the run ends; `ending` then ends the workers, and Ray if it was started."""
    spec = flags.environment.spec
    with closing(EnvProcess(spec, 1, check_goes_on=opened.supervisor.check_goes_on)) as env:
        spaces = env.observation_space, env.action_space, env.frame_stack
    is_own_code = ":" in spec.name or ":" in flags.model.spec.name  # workers must import it
    fleet = ending.enter_context(RayFleet(flags.ray, flags.run.xpid, is_own_code))
    room = fleet.room()
    workers = num_workers(flags.ray, room)
    fleet.reserve_for_learner()
    num_envs = flags.ray.num_envs or flags.ray.usual_environments(workers)
    ray = dataclasses.replace(flags.ray, num_envs=num_envs)
    flags = dataclasses.replace(flags, ray=ray)  # recorded, so that a resumed run keeps them
    say(f"{fleet}; {workers} actors of {num_envs} environments.")

    def source(learner: LearnerInfo[SharedWeights]) -> FleetSource:
        length, weights = learner.rollouts.unroll_length, learner.weights
        rollout = slot_bytes(RolloutSpec(learner.agent, learner.extras, length), num_envs=1)
        buffers, version = flags.ray.buffers(), weights.num_bytes // weights.size
        check_object_store(room, rollout, buffers, version)
        acting = precision(flags.hardware, reproducible=False)
        return FleetSource(learner, spec, acting, fleet, flags.ray, workers)

    settings = flags.run_settings(spec.name, _run_facts(flags, workers, room))
    described = DescribedEnv(env=spec, observation_space=spaces[0])
    run = LearnerRun(settings, described, opened)
    run.train(lambda spec: make_agent(spec, *spaces, MODEL_FOR_IMAGES), SharedWeights, source)


def _run_facts(flags: RayBeastFlags, workers: int, room: Room) -> RunFacts:
    return RunFacts(
        program=PROGRAM,
        num_envs=flags.ray.environments(),
        processes=workers,
        fixed_lag=None,
        cores=int(sum(node.cpus for node in room.nodes)),
    )


if __name__ == "__main__":
    end_program(main())
