# SPDX-License-Identifier: Apache-2.0
"""Slots are written row by row and copied into batches column by column."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from assorted import check_rollout
from source_envs import Counting, Nested, Stacked

from torchbeast.collect.rollout_buffers import BatchBuffer, SharedRollouts, SlotWriter
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.nest import flatten, map_leaves2
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.core.storages.rollout import RolloutSpec

T, E = 6, 4
FIRST_ENV = 20


class Player:
    """An actor without a process: plays an environment into slots."""

    def __init__(
        self,
        env: VecEnv,
        model: str = "mlp",
        num_slots: int = 3,
        use_lstm: bool = True,
        extras: tuple[str, ...] = ("policy_logits",),
    ) -> None:
        space = env.observation_space
        actor = ActorSpec(model, use_lstm=use_lstm)
        agent = make_agent(actor, space, env.action_space, env.frame_stack)
        self.actor, self.spec = agent.model, RolloutSpec(agent, extras, T)
        self.rollouts = SharedRollouts(self.spec, env.num_envs, num_slots)
        self.loop = EnvLoop(env, self.actor, seed=0)

    def play(self, slot: int) -> None:
        loop = self.loop
        writer = SlotWriter(self.rollouts.slots[slot], loop.acted.state, FIRST_ENV, slot)
        writer.write(0, loop.row, loop.acted, slot)
        for t in range(1, T + 1):
            loop.act("sample")
            loop.step()
            writer.write(t, loop.row, loop.acted, slot)

    def batch(self, size: int, spare: int = 0) -> BatchBuffer:
        return BatchBuffer(self.spec, size, pin=False, spare_columns=spare)


@pytest.fixture
def player() -> Player:
    made = Player(Counting(E))
    for slot in range(3):
        made.play(slot)
    return made


def columns_of(player: Player, size: int, pieces: list[tuple[int, int, int]]) -> Any:
    """Returns a batch of these columns: slot, first column, count."""
    batch = player.batch(size)
    for slot, first, count in pieces:
        batch.add(player.rollouts.slots[slot], first, count)
    assert batch.missing == 0
    return batch.rollout()


def test_columns_keep_their_rows_from_any_slot(player: Player) -> None:
    pieces = [(0, 1, 3), (2, 0, 2), (1, 3, 1)]
    rollout = columns_of(player, 6, pieces)
    check_rollout(rollout)
    sources = [(slot, first + i) for slot, first, count in pieces for i in range(count)]
    for column, (slot, there) in enumerate(sources):
        arrays = player.rollouts.slots[slot]
        assert rollout.policy_version[:, column].eq(slot).all()
        assert rollout.rollout_index[:, column].eq(slot).all()
        assert rollout.env_index[:, column].eq(FIRST_ENV + there).all()
        for name in ("reward", "done", "observation", "extras", "initial_agent_state"):
            for mine, theirs in zip(
                flatten(getattr(rollout, name)), flatten(arrays[name]), strict=True
            ):
                assert torch.equal(mine[:, column], torch.from_numpy(theirs[:, there].copy())), name


def test_final_observations_follow_their_columns(player: Player) -> None:
    """Environment 1 is truncated after 4 steps; 3 after 1 and, a life later, after 2."""
    rollout = columns_of(player, 5, [(1, 3, 1), (0, 0, 4)])
    rows, columns = rollout.truncations()
    assert columns.tolist() == sorted(columns.tolist())
    finals = rollout.final_observation[:, 0].tolist()
    steps = rollout.episode_step[rows, columns].tolist()
    assert finals == [{4: 4.0, 1: 1.0, 7: 2.0}[step] for step in steps]
    assert len(finals) >= 4 and set(columns.tolist()) == {0, 2, 4}


def test_a_truncation_in_row_0_was_counted_by_the_rollout_before() -> None:
    class CutAtTheLastRow(Counting):
        def step(self, action: Any) -> Any:
            step = super().step(action)
            self.steps = getattr(self, "steps", 0) + 1
            cut = step.truncated & False
            cut[1] = self.steps % T == 0
            final = step.observation[cut] if cut.any() else None
            return step._replace(terminated=cut & False, truncated=cut, final_observation=final)

    player = Player(CutAtTheLastRow(2))
    player.play(0)
    player.play(1)
    for slot in (0, 1):
        rollout = columns_of(player, 2, [(slot, 0, 2)])
        check_rollout(rollout)
        rows, columns = rollout.truncations()
        assert (rows.tolist(), columns.tolist()) == ([T], [1])
        assert rollout.truncated[0, 1] == bool(slot)
        assert torch.equal(rollout.final_observation[0], rollout.observation[T, 1])


def test_a_batch_has_the_stacks_that_acted_though_slots_hold_single_frames() -> None:
    player = Player(Stacked(2), model="shallow")
    acted_on: list[list[np.ndarray]] = []
    act = player.loop.act

    def recorded(mode: Any) -> None:
        acted_on[-1].append(player.loop.row.observation)
        act(mode)

    player.loop.act = recorded  # type: ignore[method-assign]
    for slot in range(3):
        acted_on.append([])
        player.play(slot)
        acted_on[-1].append(player.loop.row.observation)
    for slot, seen in enumerate(acted_on):
        assert player.rollouts.slots[slot]["observation"].shape == (T + 3, 2, 1, 40, 40)
        rollout = columns_of(player, 2, [(slot, 0, 2)])
        assert torch.equal(rollout.observation, torch.from_numpy(np.stack(seen)))
        assert rollout.done[1:].any()


def test_stacks_of_truncated_episodes_end_in_their_last_frame() -> None:
    player = Player(Stacked(2), model="shallow")
    player.play(0)
    rollout = columns_of(player, 2, [(0, 0, 2)])
    assert rollout.final_observation.shape == (1, 3, 40, 40)
    assert rollout.final_observation[0, :, 0, 0].tolist() == [2, 3, 4]


def test_nests_keep_their_structure() -> None:
    player = Player(SyncVecEnv([Nested] * 2, "Nested"))
    player.play(0)
    rollout = columns_of(player, 2, [(0, 0, 2)])
    assert rollout.action["levers"][1].shape == (T + 1, 2, 2, 1)
    assert rollout.observation["time"][1].dtype == torch.uint8
    structures = []
    map_leaves2(
        lambda *leaves: structures.append(leaves), rollout.observation, rollout.final_observation
    )
    assert len(structures) == 6


def test_a_batch_that_is_used_again_holds_only_new_rollouts(player: Player) -> None:
    batch = player.batch(E)
    batch.add(player.rollouts.slots[0], 0, E)
    first = batch.rollout()
    assert len(first.final_observation)
    batch.clear()
    assert batch.missing == E
    batch.add(player.rollouts.slots[1], 0, E)
    second = batch.rollout()
    assert second.observation.data_ptr() == first.observation.data_ptr()
    assert second.policy_version.eq(1).all()
    assert len(second.final_observation) == len(second.truncations()[0])


def test_spare_columns_are_left_to_others(player: Player) -> None:
    """Whatever they hold: the columns of the slots and their final observations are the same."""
    plain, spare = player.batch(E), player.batch(E, spare=3)
    for leaf in flatten(spare._arrays):
        leaf[:, E:] = 1
    for batch in (plain, spare):
        batch.add(player.rollouts.slots[1], 0, E)
        assert batch.missing == 0
    rollout, wide = plain.rollout(), spare.rollout()
    assert wide.batch_size == E + 3 and wide.reward[:, E:].eq(1).all()
    mine = wide.columns(0, E)
    check_rollout(mine)
    for name in (
        "observation",
        "truncated",
        "final_observation",
        "initial_agent_state",
        "env_index",
    ):
        for found, expected in zip(
            flatten(getattr(mine, name)), flatten(getattr(rollout, name)), strict=True
        ):
            assert torch.equal(found, expected), name


def test_a_second_mapping_of_the_file_sees_what_was_written(player: Player) -> None:
    other = SharedRollouts(player.spec, E, 3, player.rollouts.descriptor)
    for mine, theirs in zip(player.rollouts.slots, other.slots, strict=True):
        for a, b in itertools.zip_longest(flatten(mine), flatten(theirs)):
            assert (a == b).all() and a.shape == b.shape and a.dtype == b.dtype


def test_slots_do_not_overlap(player: Player) -> None:
    written = [slot["policy_version"].copy() for slot in player.rollouts.slots]
    assert [set(versions.flatten()) for versions in written] == [{0}, {1}, {2}]
    player.play(1)
    assert (player.rollouts.slots[0]["policy_version"] == 0).all()
    assert (player.rollouts.slots[2]["policy_version"] == 2).all()


@pytest.mark.parametrize("field", ["observation", "final_observation"])
def test_leaves_under_other_names_are_not_taken_for_those_of_the_space(field: str) -> None:
    player = Player(SyncVecEnv([Nested] * E, "nested"), "mlp")
    loop, writer = player.loop, SlotWriter(player.rollouts.slots[0], player.loop.acted.state, 0, 0)
    row = loop.row._replace(truncated=np.ones(E, bool), final_observation=loop.row.observation)
    writer.write(1, row, loop.acted, 0)
    renamed = {f"other {name}": leaf for name, leaf in row.observation.items()}
    with pytest.raises(ValueError, match="other "):
        writer.write(2, row._replace(**{field: renamed}), loop.acted, 0)
