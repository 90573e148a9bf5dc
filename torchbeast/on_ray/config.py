# SPDX-License-Identifier: Apache-2.0
"""Settings of a run on Ray."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.collect.config import BufferedActorsConfig
from torchbeast.core.base.checks import above, at_least, require

CLIENT = "ray://"  # prefix of the address of a cluster from outside


@dataclass(frozen=True, kw_only=True)
class RayConfig(BufferedActorsConfig):
    """The environments, and the Ray actors that step them on this machine or on a cluster."""

    address: str | None = None
    """Ray cluster to run on: auto (the cluster to which this machine belongs), HOST:PORT of its
    head node, or ray://HOST:10001 from outside. Default: $RAY_ADDRESS if set, else start Ray on
    this machine for this run."""
    num_workers: int | None = None
    """Ray actors, among which the environments are divided; each has a copy of the network.
    Default: all that fit on the cluster, at most one per environment."""
    min_workers: int | None = None
    """Ray actors that must find room at startup. The rest start when the cluster gets room, because
    nodes join or other jobs end. Default: --num_workers."""
    actor_cpus: float = 1.0
    """CPUs that Ray reserves for each Ray actor. An actor uses one."""
    learner_cpus: float = 0.0
    """CPUs of this machine that Ray keeps free for the learner."""
    learner_gpus: float = 0.0
    """GPUs of this machine that Ray keeps free for the learner. With 0 the learner still uses a GPU
    if it sees one, even if Ray gives that GPU to others."""
    working_dir: str | None = None
    """Folder with your code, which Ray copies to the machines of the cluster. Default: the current
    folder if the environment or the network is your own (module:attribute), else none."""
    dashboard: bool = False
    """Start Ray's dashboard if this run starts Ray. Needs pip install 'ray[default]'."""

    of_processes = "num_workers"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, min_workers=self.min_workers)
        at_least(0, learner_cpus=self.learner_cpus, learner_gpus=self.learner_gpus)
        above(0, actor_cpus=self.actor_cpus)
        require(
            self.min_workers is None or self.min_workers <= (self.num_workers or 0),
            f"min_workers {self.min_workers} is more than num_workers {self.num_workers}: "
            "give at least as many num_workers",
        )
        require(
            not (self.address or "").startswith(CLIENT) or not self.reserves_for_learner,
            f"with {CLIENT} the learner runs outside the cluster, which keeps nothing free for it: "
            "leave out learner_cpus and learner_gpus, or submit the run as a job",
        )

    @property
    def reserves_for_learner(self) -> bool:
        """Whether Ray keeps anything free for the learner."""
        return self.learner_cpus > 0 or self.learner_gpus > 0
