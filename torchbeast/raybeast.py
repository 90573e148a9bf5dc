# SPDX-License-Identifier: Apache-2.0
"""RayBeast: training on Ray, on one machine or on a cluster, without a compiler.

python -m torchbeast.raybeast --preset pong                   starts Ray on this machine
python -m torchbeast.raybeast --preset pong --address auto    uses this machine's cluster
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torchbeast.cli import command_line
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.collect.contract import LearnerInfo
from torchbeast.collect.rollout_buffers import slot_bytes
from torchbeast.collect.source import FleetCollection, FleetSource
from torchbeast.core.algos.config import with_values
from torchbeast.envs.env_process import spaces_of
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import EXIT_DONE
from torchbeast.fleets.supervisor import Supervisor, end_program
from torchbeast.fleets.system import check_alone
from torchbeast.fleets.waiting import say
from torchbeast.on_ray.config import Room, check_object_store, is_own_code, num_workers
from torchbeast.on_ray.fleet import RayFleet
from torchbeast.reporting.run_folder import session
from torchbeast.run.learner_run import LearnerRun
from torchbeast.run.plan import Plan

PROGRAM = "raybeast"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    return command_line.main(RayBeastFlags, PROGRAM, argv, run)


def run(flags: RayBeastFlags) -> int:
    """Trains or evaluates, depending on --mode."""
    check_alone(PROGRAM)
    if flags.command.mode != "train":
        return flags.test_run(flags.environment.asked)
    with session(flags.run.folder, command_line.flatten(flags)) as opened, ExitStack() as ending:
        LearnerRun(plan_of(flags, opened.supervisor, ending), opened).train()
    return EXIT_DONE


def plan_of(flags: RayBeastFlags, supervisor: Supervisor, ending: ExitStack) -> Plan:
    """Joins or starts Ray, and returns the plan of the run; `ending` leaves or stops Ray."""
    env = flags.environment.spec
    spaces = spaces_of(env, supervisor.check_goes_on)
    own_code = is_own_code(env.name, flags.model.spec.name)
    fleet = ending.enter_context(RayFleet(flags.ray, flags.run.xpid, own_code))
    room = fleet.room()
    workers = num_workers(flags.ray, room)
    fleet.reserve_for_learner()
    num_envs = flags.ray.num_envs or flags.ray.usual_environments(workers)
    flags = with_values(flags, {"num_envs": num_envs})  # recorded, so that a resumed run keeps it
    say(f"{fleet}; {num_envs} environments in {workers} actor{'s' * (workers > 1)}.")
    collection = ClusterCollection(
        num_envs=num_envs,
        processes=workers,
        fixed_lag=None,
        cores=int(sum(node.cpus for node in room.nodes)),
        is_local=all(node.is_learners for node in room.nodes),
        actors=flags.ray,
        make_fleet=lambda: fleet,
        room=room,
    )
    return flags.plan(PROGRAM, env, spaces, collection)


@dataclass(frozen=True, kw_only=True)
class ClusterCollection(FleetCollection):
    """Collects on a cluster, whose object store must have room for rollouts and weights."""

    room: Room

    def source(self, learner: LearnerInfo, env: EnvSpec, ending: ExitStack) -> FleetSource:
        """Makes the source; raises UsageError if the object store is too small."""
        rollout = slot_bytes(learner.rollouts, num_envs=1)
        version = learner.weights.num_bytes // learner.weights.size
        check_object_store(self.room, rollout, self.actors.buffers(), version)
        return super().source(learner, env, ending)


if __name__ == "__main__":
    end_program(main())
