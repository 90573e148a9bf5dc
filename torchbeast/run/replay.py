# SPDX-License-Identifier: Apache-2.0
"""Makes the replay of a run, checks its memory, restores its saved contents, and makes its source.

The replay belongs to the run, or is shared with other agents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from torchbeast.collect import replayed
from torchbeast.collect.contract import LearnerInfo, Source
from torchbeast.collect.replay import Join, JoinRequest, Replay
from torchbeast.core.actors.contract import Agent
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.storages.replay.rollout_replay import ByPriority, RolloutReplay
from torchbeast.core.storages.replay.store import RolloutStore, bytes_per_transition, row_specs
from torchbeast.core.storages.replay.transition_replay import (
    Sampling,
    TransitionReplay,
    check_goals,
)
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.envs.env_process import Outcome
from torchbeast.errors import UsageError, as_usage_error
from torchbeast.fleets.system import check_memory, in_bytes
from torchbeast.fleets.waiting import say, waiting_for
from torchbeast.reporting.run_folder import Session
from torchbeast.run.assemble import LearnerConfig
from torchbeast.run.checkpoint_writer import REPLAY
from torchbeast.seeds import seed_of


def with_replay(
    config: LearnerConfig,
    online: Source,
    learner: LearnerInfo,
    free: int | None,
    session: Session,
    is_resumed: bool,
    outcome: Callable[[], Outcome],
    join: Join | None,
    ending: ExitStack,
) -> tuple[Source, RolloutStore | None]:
    """Puts a replay behind the source of a run: its own replay, or one that agents share.

    Returns the source with the replay, and the replay if it is to be saved. free: bytes of memory
    that were free before the online source was made. session: of the run. outcome: see make_replay.
    join: joins the replay that agents share, which `ending` leaves.
    """
    agent, at_once = learner.rollouts.agent, learner.batches_at_once
    folder, of_run = session.folder.path, (config, learner.rollouts, learner.seed)
    if join is not None:
        shared = ending.enter_context(joined_replay(*of_run, folder.name, join))
        session.supervisor.on_close(shared.close)
        return mixed_source(online, shared, config, agent, at_once), None
    store = make_replay(*of_run, online.num_bytes, free, outcome)
    if is_resumed:
        resume_replay(store, folder, config.replay.checkpoint_replay)
    saved = store if config.replay.checkpoint_replay else None
    if config.learns_from_transitions:
        return transition_source(online, store, config, learner.first_step), saved
    return mixed_source(online, store, config, agent, at_once), saved


def make_replay(
    config: LearnerConfig,
    rollouts: RolloutSpec,
    seed: int,
    buffers: int,
    free: int | None,
    outcome: Callable[[], Outcome] | None = None,
) -> Any:
    """Makes an empty replay of rollouts or of single steps, and prints how much memory it needs.

    rollouts: of the online source. seed: of this part of the run. buffers: bytes of the online
    source. free: bytes of memory that the program may use for both; None: unknown. outcome: for
    hindsight, returns the function that computes rewards of other goals.

    Raises UsageError if it needs more memory than there is.
    """
    size, agent = config.replay.replay_size, rollouts.agent
    sampling = _sampling(config, agent, outcome) if config.learns_from_transitions else None
    windows = by_priority(config)
    specs = rollouts.fields()
    with as_usage_error():
        each = bytes_per_transition(specs, agent.frame_stack)
    each += 0 if sampling is None else sampling.extra_bytes(size)
    check_memory(size, each, buffers, free)
    left = "" if free is None else f" Free memory: {in_bytes(free)}."
    say(
        f"Replay buffer: {size:,} steps of {each:,} bytes, {in_bytes(size * each)} when full. "
        f"Other buffers: {in_bytes(buffers)}.{left}"
    )
    made = specs, size, agent.frame_stack, seed_of(seed, "replay")
    try:
        if sampling is None:
            return RolloutReplay(*made, windows)
        return TransitionReplay(*made, sampling)
    except (MemoryError, ValueError) as error:
        raise UsageError(f"{error}: use a smaller replay_size") from error


def by_priority(config: LearnerConfig) -> ByPriority | None:
    """Returns how rollouts are drawn by priority; None: uniformly."""
    if not config.algo.burns_in:
        return None
    stride = math.gcd(config.rollouts.unroll_length, config.algorithm.burn_in)
    return ByPriority(config.transitions.priority_exponent, stride)


def _sampling(
    config: LearnerConfig, agent: Agent, outcome: Callable[[], Outcome] | None
) -> Sampling:
    """Returns how to sample single steps; raises UsageError if hindsight lacks goals."""
    how, hindsight = config.transitions, None
    if how.hindsight_share and outcome is not None:
        with as_usage_error():
            check_goals(agent.observation_space, agent.frame_stack)
        hindsight = outcome()  # code of the user's environment
    return Sampling(
        n_step=how.n_step,
        priority_exponent=how.priority_exponent,
        hindsight=hindsight,
        hindsight_share=how.hindsight_share,
    )


def transition_source(
    online: Source, replay: TransitionReplay, config: LearnerConfig, first_step: int
) -> replayed.TransitionSource:
    """Returns the source of single steps; first_step: env steps of earlier parts of the run."""
    settings, rollouts, how = config.replay, config.rollouts, config.transitions
    rate = settings.updates_per_step(
        rollouts.batch_size, rollouts.unroll_length, config.total_steps
    )
    left, missing = config.total_steps - first_step, settings.learn_start - replay.size
    if first_step and 0 < left <= missing:
        say(
            f"Only one update follows: the replay collects {missing:,} steps first (learn_start), "
            f"and {left:,} are left until total_steps. Use a smaller learn_start, or more steps."
        )
    schedule = replayed.Schedule(
        batch_size=rollouts.batch_size,
        updates_per_step=rate,
        learn_start=settings.learn_start,
        total_steps=config.total_steps,
        first_step=first_step,
        beta=how.priority_beta if how.priority_exponent else None,
    )
    if config.synchronous_rollouts:
        return replayed.SynchronousTransitions(online, replay, schedule)
    kind = replayed.FreeTransitions if math.isinf(rate) else replayed.TransitionSource
    return kind(online, replay, schedule)


def resume_replay(replay: RolloutStore, folder: Path, is_saved: bool) -> None:
    """Loads the replay that an earlier part of the run saved, and prints what it starts with.

    is_saved: whether this run saves its replay.

    Raises UsageError if the file does not fit.
    """
    path = folder / REPLAY
    if not is_saved or not path.exists():
        why = f"there is no {path} yet" if is_saved else "checkpoint_replay would save it"
        say(f"The replay starts empty: {why}.")
        return
    try:
        with open(path, "rb") as file:
            replay.load(file)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{path}: {error}; move it away to start with an empty replay, or use the flags with "
            "which it was saved"
        ) from error
    replay.new_source()
    say(f"The replay continues with the {replay.size:,} steps in {path}.")


def mixed_source(
    online: Source, replay: Replay, config: LearnerConfig, agent: Agent, in_flight: int
) -> replayed.MixedSource:
    """Returns the source of new and replayed rollouts; see MixedSource."""
    is_walking = by_priority(config) is None
    state = map_leaves(Tensor.cpu, agent.model.initial_state(1)) if is_walking else ()
    return replayed.MixedSource(
        online,
        replay,
        batch_size=config.rollouts.batch_size,
        spare_columns=config.spare_columns,
        learn_start=config.replay.learn_start,
        in_flight=in_flight,
        initial_state=state,
        beta=None if is_walking else config.transitions.priority_beta,
    )


@contextmanager
def joined_replay(
    config: LearnerConfig, rollouts: RolloutSpec, seed: int, name: str, join: Join
) -> Iterator[Replay]:
    """Joins a replay that agents share, and prints what it holds; leaves it at the end.

    rollouts, seed: see make_replay. name: of the run; the replay identifies agents by it. join:
    joins the replay of the config's address.

    Raises UsageError if the replay does not exist, or does not accept this run's rollouts.
    """
    joining = JoinRequest(
        name=name,
        row=row_specs(rollouts.fields(), 1),
        unroll_length=rollouts.unroll_length,
        frame_stack=rollouts.agent.frame_stack,
        replay_size=config.replay.replay_size,
        columns=config.rollouts.batch_size,
        spare_columns=config.spare_columns,
        seed=seed_of(seed, "replay"),
    )
    with ExitStack() as joined:
        with waiting_for(f"the shared replay {config.replay.replay_service}"):
            replay = joined.enter_context(join(joining))
        size, filled = joining.replay_size, replay.stats().size
        say(f"The replay, shared with other agents, holds {size:,} steps. It has {filled:,}.")
        yield replay
