# SPDX-License-Identifier: Apache-2.0
"""The replay that a run shares with other agents, in a process of its own or on Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any

from torchbeast.core.actors.agent import Agent
from torchbeast.core.storages.stored_rows import bytes_per_transition, bytes_per_truncation
from torchbeast.errors import as_usage_error
from torchbeast.learning.assemble import LearnerConfig
from torchbeast.learning.learner_run import Learner, LearnerRun
from torchbeast.learning.replay import mixed_source, specs_of
from torchbeast.processes.memory import in_bytes
from torchbeast.reporting.waiting import waiting_for
from torchbeast.schemes.ray_replay import ON_RAY, joined_on_ray
from torchbeast.seeds import seed_of
from torchbeast.sources.contract import Source
from torchbeast.sources.replay import Replay
from torchbeast.sources.sharing.client import SharedReplayClient
from torchbeast.sources.sharing.joining import Joining, joining_of


@contextmanager
def shared_replay(
    run: LearnerRun, online: Source, learner: Learner[Any], free: int | None
) -> Iterator[tuple[Source, None]]:
    """Puts a replay that several agents share in front of the run's source; see WithReplay."""
    config, agent, xpid = run.settings.learner, learner.agent, run.settings.run.xpid
    with joined_replay(config, agent, learner.extras, learner.seed, xpid) as replay:
        run.session.supervisor.on_close(replay.close)
        yield mixed_source(online, replay, config, agent, learner.batches_at_once), None


@contextmanager
def joined_replay(
    config: LearnerConfig, agent: Agent, extras: Sequence[str], seed: int, name: str
) -> Iterator[Replay]:
    """Joins the replay that other agents share, and prints what it holds; leaves it at the end.

    extras, seed: see make_replay. name: of the run, by which the replay knows it.

    Raises UsageError when there is none, and when it does not take this run's rollouts.
    """
    settings, rollouts = config.replay, config.rollouts
    specs = specs_of(config, agent, extras)
    with as_usage_error():
        each = bytes_per_transition(specs, agent.frame_stack)
        more = bytes_per_truncation(specs, agent.frame_stack)
        joining = joining_of(
            name,
            specs,
            agent.frame_stack,
            settings.replay_size,
            (rollouts.batch_size, config.spare_columns),
            seed_of(seed, "replay"),
        )
    size = settings.replay_size
    with ExitStack() as joined:
        with waiting_for(f"the shared replay {settings.replay_service}"):
            replay = joined.enter_context(_client(str(settings.replay_service), joining))
        print(
            f"The replay, shared with other agents, holds {size:,} steps of {each:,} bytes: "
            f"{in_bytes(size * each)} when it is full ({more:,} bytes more for each truncated "
            f"episode). It has {replay.size:,}.",
            flush=True,
        )
        yield replay


def _client(address: str, joining: Joining) -> AbstractContextManager[Replay]:
    """Returns what joins the replay at an address."""
    if address.startswith(ON_RAY):
        return joined_on_ray(address, joining)
    return closing(SharedReplayClient(address, joining))
