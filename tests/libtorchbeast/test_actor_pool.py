# SPDX-License-Identifier: Apache-2.0
"""ActorPool: its inference requests, its rollouts, and how every failure reaches run()."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served_envs
import torch
from background import SOON, Background, wait_for
from served_envs import Counting, RaisingLate, Vector, Waiting
from serving import Game, playing, serving, zeros_agent

import libtorchbeast
from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher


def numbered_agent() -> Any:
    """An agent whose actions count the steps of one environment; its state is the last action."""

    def agent(inputs: Any) -> Any:
        _, state = inputs
        action = (state + 1).to(torch.int64)
        logits = torch.stack([action, -action], -1).to(torch.float32)
        return (action[:1], logits[:1], action[:1].to(torch.float32)), action

    return agent


class TestConstructor:
    def arguments(self, **changed: Any) -> dict[str, Any]:
        return {
            "unroll_length": 4,
            "learner_queue": BatchingQueue(),
            "inference_batcher": DynamicBatcher(),
            "env_server_addresses": ["unix:/nobody"],
            "initial_agent_state": (),
        } | changed

    def test_all_arguments_may_be_keywords_or_positional(self) -> None:
        ActorPool(**self.arguments())
        ActorPool(*self.arguments().values())

    @pytest.mark.parametrize("name", ["learner_queue", "inference_batcher"])
    def test_queue_and_batcher_must_not_be_none(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must not be None"):
            ActorPool(**self.arguments(**{name: None}))

    @pytest.mark.parametrize(
        ("changed", "text"),
        [
            ({"unroll_length": 0}, "unroll_length must be >= 1, got 0"),
            ({"initial_agent_state": torch.zeros(1)}, r"leaves \[layers, 1, ...\].*got \[1\]"),
            ({"initial_agent_state": torch.zeros(1, 2, 3)}, r"got \[1, 2, 3\]"),
        ],
    )
    def test_impossible_arguments_are_refused(self, changed: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            ActorPool(**self.arguments(**changed))

    def test_counters_begin_at_zero(self) -> None:
        pool = ActorPool(**self.arguments())
        assert (pool.count(), pool.live_streams(), pool.lost_streams()) == (0, 0, 0)
        assert pool.away_streams() == [], "they were never there"

    def test_a_pool_keeps_its_queue_and_batcher_alive(self) -> None:
        arguments = self.arguments()
        arguments["learner_queue"].close()
        pool = ActorPool(**arguments)
        del arguments
        pool.run()


class TestInference:
    def test_inference_gets_inputs_of_the_documented_structure_dtypes_and_shapes(
        self, address: str
    ) -> None:
        asked: list[Any] = []

        def agent(inputs: Any) -> Any:
            asked.append(inputs)
            return (torch.zeros(1, 3, dtype=torch.int64),), inputs[1]

        state = {"h": torch.ones(2, 1, 5), "c": torch.zeros(1, 1, dtype=torch.int64)}
        with serving(Vector, address), playing([address], agent, agent_state=state) as game:
            game.rollout()
        (observation, reward, done, episode_step, episode_return), agent_state = asked[0]
        assert observation.shape == (1, 3, 1) and observation.dtype is torch.int32
        for leaf, dtype in (
            (reward, torch.float32),
            (done, torch.bool),
            (episode_step, torch.int32),
            (episode_return, torch.float32),
        ):
            assert leaf.shape == (1, 3) and leaf.dtype is dtype
        assert agent_state["h"].shape == (2, 3, 5) and (agent_state["h"] == 1).all()
        assert agent_state["c"].shape == (1, 3)

    def test_streams_are_joined_along_dimension_one(self, address: str) -> None:
        widths = set()

        def agent(inputs: Any) -> Any:
            (observation, reward, *_), state = inputs
            assert observation.shape[:2] == reward.shape and state.shape == (2, reward.shape[1], 1)
            widths.add(reward.shape[1])
            return (torch.zeros(1, reward.shape[1], dtype=torch.int64),), state

        state = torch.zeros(2, 1, 1)
        with serving(Vector, address):
            with playing([address] * 4, agent, agent_state=state) as game:
                while max(widths, default=0) < 6:
                    game.rollout()
        assert {width % 3 for width in widths} == {0}

    def test_each_stream_gets_its_own_state_back(self, address: str) -> None:
        """Every environment's state counts its own steps, so it must follow its episode counter."""

        def agent(inputs: Any) -> Any:
            _, total = inputs
            return (torch.zeros_like(total, dtype=torch.int64), total), total + 1

        env = type("Env", (Counting,), {"ending": lambda self, over: (False, False)})
        with serving(env, address):
            with playing([address] * 4, agent, agent_state=torch.zeros(1, 1)) as game:
                rollouts = game.rollouts(40)
        compared = 0
        for nest, info in rollouts:
            ((_, _, _, episode_step, _), (_, total)), state = nest
            first = int(info["rollout"][0, 0]) * 4
            assert episode_step[:, 0].tolist() == list(range(first, first + 5))
            assert total[1:, 0].tolist() == episode_step[:-1, 0].tolist()
            assert state.item() == first
            compared += first > 0
        assert compared > 0

    def test_inference_may_write_to_its_inputs(self, address: str) -> None:
        def agent(inputs: Any) -> Any:
            (observation, reward, done, *_), _ = inputs
            for leaf in (observation, reward, done):
                leaf.fill_(1)
            return zeros_agent(inputs)

        with serving(Counting, address), playing([address], agent, unroll_length=5) as game:
            nest, _ = game.rollout()
        (observation, reward, done, *_), _ = nest[0]
        assert observation[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
        assert reward[0, 0] == 0 and done[:, 0].tolist() == [True, False, False, True, False, False]

    def test_inference_may_write_to_its_inputs_if_frames_are_stacked(self, address: str) -> None:
        class Stacking(Vector):
            frame_stack = 2

        def agent(inputs: Any) -> Any:
            inputs[0][0].fill_(99)
            return zeros_agent(inputs)

        with serving(Stacking, address), playing([address], agent) as game:
            nest, _ = game.rollout()
        assert nest[0][0][0][:, 1].tolist() == [[10, 10], [10, 11], [11, 12], [10, 10], [10, 11]]


class TestRollouts:
    def test_row_t_holds_the_output_that_led_to_its_observation(self, address: str) -> None:
        with serving(Counting, address):
            state = torch.zeros(1, 1, dtype=torch.int64)
            with playing([address], numbered_agent(), agent_state=state) as game:
                rollouts = game.rollouts(3)
        for number, (nest, _) in enumerate(rollouts):
            (_, (action, logits, baseline)), state = nest
            first = 4 * number
            assert action.shape == (5, 1) and logits.shape == (5, 1, 2)
            assert action[:, 0].tolist() == [first + i for i in range(5)]
            assert logits[:, 0, 1].tolist() == [-float(first + i) for i in range(5)]
            assert baseline.dtype is torch.float32
            assert state.item() == first, "the state with which row 0's observation is processed"

    def test_row_0_repeats_row_t_of_the_rollout_before(self, address: str) -> None:
        with serving(Counting, address):
            state = torch.zeros(1, 1, dtype=torch.int64)
            with playing([address], numbered_agent(), agent_state=state) as game:
                (before, info_before), (after, info_after) = game.rollouts(2)
        compared = 0
        for row_t, row_0 in zip(_leaves(before[0]), _leaves(after[0]), strict=True):
            assert torch.equal(row_t[-1], row_0[0])
            compared += 1
        assert compared == 8
        for name in ("policy_version", "terminated", "truncated", "episode_end"):
            assert torch.equal(info_before[name][-1], info_after[name][0])

    def test_the_very_first_row_has_a_dummy_agent_output(self, address: str) -> None:
        def agent(inputs: Any) -> Any:
            return (torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1, 2)), ()

        with serving(Counting, address), playing([address], agent) as game:
            (first, _), (second, _) = game.rollouts(2)
        (_, (action, logits)), _ = first
        assert action[0].item() == 0 and (action[1:] == 1).all() and (logits[1:] == 1).all()
        assert second[0][1][0][0].item() == 1

    def test_the_info_of_a_rollout_has_the_documented_shapes(self, address: str) -> None:
        with serving(Vector, address), playing([address], unroll_length=2) as game:
            _, info = game.rollout()
        assert sorted(info) == [
            "episode_end",
            "final_observation",
            "policy_version",
            "rollout",
            "stream",
            "terminated",
            "truncated",
        ]
        assert info["stream"].shape == info["rollout"].shape == (1, 3)
        assert info["final_observation"].shape == (1, 0, 1)
        for name, dtype in (
            ("policy_version", torch.int64),
            ("terminated", torch.bool),
            ("truncated", torch.bool),
            ("episode_end", torch.bool),
        ):
            assert info[name].shape == (3, 3) and info[name].dtype is dtype

    def test_the_info_numbers_environments_and_rollouts(self, address: str) -> None:
        with serving(Vector, address), playing([address] * 2) as game:
            wait_for(lambda: game.pool.live_streams() == 2)
            infos = [info for _, info in game.rollouts(20)]
        seen: dict[tuple[int, ...], list[int]] = {}
        for info in infos:
            seen.setdefault(tuple(info["stream"][0].tolist()), []).append(info["rollout"][0, 0])
        assert len({env for envs in seen for env in envs}) == 6
        for numbers in seen.values():
            assert numbers == list(range(len(numbers)))

    def test_policy_versions_are_recorded_row_by_row(self, address: str) -> None:
        queue, batcher = BatchingQueue(maximum_batch_size=1), DynamicBatcher()
        with serving(Counting, address):
            run = Background(ActorPool(2, queue, batcher, [address], ()).run)
            for version in range(1, 6):
                batch = next(batcher)
                batch.set_outputs(zeros_agent(batch.get_inputs()), version)
            versions = [next(queue.with_info())[1]["policy_version"] for _ in range(2)]
            batcher.close()
            run.result()
        assert versions[0][1:, 0].tolist() == [1, 2]
        assert versions[1][:, 0].tolist() == [2, 3, 4]

    @pytest.mark.parametrize("columns", [1, 3])
    def test_a_stream_is_split_into_items_of_rollout_columns(
        self, columns: int, address: str
    ) -> None:
        with serving(Vector, address), playing([address], rollout_columns=columns) as game:
            rollouts = game.rollouts(3 // columns)
        tens = [nest[0][0][0][0, :, 0] // 10 for nest, _ in rollouts]
        assert torch.cat(tens).tolist() == [0, 1, 2]
        assert torch.cat([info["stream"][0] for _, info in rollouts]).diff().tolist() == [1, 1]

    def test_columns_that_do_not_divide_the_environments_are_refused(self, address: str) -> None:
        with serving(Vector, address):
            game = Game([address], rollout_columns=2)
            with pytest.raises(ValueError, match=f"2 columns .* 3 environments.*{address}"):
                game.end()
            game.close()

    def test_truncated_environments_final_observations_come_by_column_then_row(
        self, address: str
    ) -> None:
        with serving(served_envs.TruncatedVector, address):
            with playing([address], unroll_length=6) as game:
                nest, info = game.rollout()
        assert info["truncated"].sum(0).tolist() == [2, 0, 2]
        assert info["final_observation"][0, :, 0].tolist() == [3, 3, 23, 23]
        assert nest[0][0][2][3].tolist() == [True, True, True], "done is both ends"
        assert nest[0][0][0][3, :, 0].tolist() == [0, 10, 20]

    def test_count_is_the_number_of_steps_of_all_environments(self, address: str) -> None:
        with serving(Vector, address), playing([address], queue_size=1) as game:
            game.rollouts(2)
            wait_for(lambda: game.queue.size() == 1)
            counted = game.pool.count()
        assert counted >= 2 * 4 * 3 and counted % 12 == 0

    def test_streams_are_live_until_the_end(self, address: str) -> None:
        with serving(Counting, address), playing([address] * 3) as game:
            wait_for(lambda: game.pool.live_streams() == 3)
            game.rollouts(3)
        assert game.pool.live_streams() == 0 and game.pool.lost_streams() == 0

    def test_a_full_queue_stops_the_environments(self, address: str) -> None:
        steps: list[int] = []

        class Env(Counting):
            def step(self, action: Any) -> Any:
                steps.append(1)
                return super().step(action)

        with serving(Env, address), playing([address], queue_size=1) as game:
            wait_for(lambda: game.queue.size() == 1)
            wait_for(lambda: len(steps) == 8)
            assert game.pool.count() == 4, "the second rollout waits for room"
            wait_for(lambda: game.pool.steps() == 8)
            game.rollout()


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, tuple):
        return [leaf for entry in nest for leaf in _leaves(entry)]
    return [nest]


class TestAgentErrors:
    """An answer that cannot be used ends the run with a message that says why."""

    @pytest.mark.parametrize(
        ("outputs", "text"),
        [
            (torch.zeros(1, 1), "Expected agent output to be tuple"),
            ({"action": torch.zeros(1, 1)}, "Expected agent output to be tuple"),
            (
                ((torch.zeros(1, 1),),),
                "Expected agent output to be ((action, ...), new_state) but got sequence of "
                "length 1",
            ),
            (
                ((torch.zeros(1, 1),), (), ()),
                "Expected agent output to be ((action, ...), new_state) but got sequence of "
                "length 3",
            ),
            (
                (),
                "Expected agent output to be ((action, ...), new_state) but got sequence of "
                "length 0",
            ),
            (
                (torch.zeros(1, 1), ()),
                "Expected first entry of agent output to be a (action, ...) tuple",
            ),
            (
                ({"action": torch.zeros(1, 1)}, ()),
                "Expected first entry of agent output to be a (action, ...) tuple",
            ),
            (((), ()), "Expected first entry of agent output to be a (action, ...) tuple"),
        ],
    )
    def test_a_wrong_structure_is_named(self, outputs: Any, text: str, address: str) -> None:
        with serving(Counting, address):
            game = Game([address], lambda inputs: outputs)
            with pytest.raises(ValueError) as failure:
                game.end()
            game.close()
        assert str(failure.value) == text + self.of_stream_0(address)

    @staticmethod
    def of_stream_0(address: str) -> str:
        return f" (stream 0, of the environment server at {address})"

    def test_outputs_without_time_and_batch_are_named(self, address: str) -> None:
        with serving(Counting, address):
            game = Game([address], lambda inputs: ((torch.zeros(2, 1),), ()))
            with pytest.raises(ValueError, match=rf"\[1, 1, ...\], got \[2, 1\].*{address}"):
                game.end()
            game.close()

    @pytest.mark.parametrize(
        "state", [(), torch.zeros(1, 1, 5), torch.zeros(1, 1, 4).double(), (torch.zeros(1, 1, 4),)]
    )
    def test_a_state_unlike_the_initial_one_is_refused(self, state: Any, address: str) -> None:
        def agent(inputs: Any) -> Any:
            return zeros_agent(inputs)[0], state

        with serving(Counting, address):
            game = Game([address], agent, agent_state=torch.zeros(1, 1, 4))
            with pytest.raises(ValueError, match=rf"(got|nests don't match).*{address}"):
                game.end()
            game.close()

    @pytest.mark.parametrize(
        "action",
        [torch.zeros(1, 1, 2).double(), torch.zeros(1, 1), {"move": torch.zeros(1, 1)}],
        ids=["shape", "dtype", "structure"],
    )
    def test_an_action_that_the_environment_cannot_take_is_named(
        self, action: Any, address: str
    ) -> None:
        class Env(Counting):
            def step(self, action: Any) -> Any:
                assert action.shape == () and action.dtype == np.int64
                return super().step(action)

        with serving(Env, address):
            game = Game([address], lambda inputs: ((action,), ()))
            with pytest.raises(RuntimeError, match=address):
                game.end()
            game.close()

    @pytest.mark.parametrize(
        "changed",
        [
            torch.zeros(1, 1, 3),
            torch.zeros(1, 1),
            torch.zeros(1, 1, 100_000),
            torch.zeros(1, 1, 2).double(),
            (torch.zeros(1, 1, 2),),
        ],
        ids=["smaller", "fewer dimensions", "larger", "dtype", "structure"],
    )
    def test_an_output_that_changes_within_a_rollout_is_refused(
        self, changed: Any, address: str
    ) -> None:
        answers = iter([torch.zeros(1, 1, 5000)] * 2)

        def agent(inputs: Any) -> Any:
            return (torch.zeros(1, 1, dtype=torch.int64), next(answers, changed)), ()

        with serving(Counting, address):
            game = Game([address], agent, unroll_length=20)
            with pytest.raises(ValueError, match=f"(float32|nests don't match).*{address}"):
                game.end()
            game.close()
        assert game.pool.count() == 0

    def test_a_batch_that_is_dropped_ends_the_run(self, address: str) -> None:
        queue, batcher = BatchingQueue(), DynamicBatcher()
        with serving(Counting, address):
            run = Background(ActorPool(2, queue, batcher, [address], ()).run)
            next(batcher)
            with pytest.raises(libtorchbeast.AsyncError):
                run.result()
        assert queue.is_closed() and batcher.is_closed()


class TestEnvironmentFailures:
    """Each failure reaches run(), with its cause and the stream's address."""

    def failure(self, env: Any, address: str) -> BaseException:
        """Returns the error of run()."""
        with serving(env, address):
            game = Game([address])
            with pytest.raises(Exception) as failure:
                game.end()
            game.close()
        assert address in str(failure.value)
        assert game.queue.is_closed() and game.batcher.is_closed()
        return failure.value

    def test_an_exception_comes_with_its_traceback(self, address: str) -> None:
        error = self.failure(served_envs.Raising, address)
        assert type(error) is RuntimeError
        assert "Traceback (most recent call last)" in str(error)
        assert "served_envs.py" in str(error) and "in observation" in str(error)
        assert "KeyError: 'the joystick is gone'" in str(error)

    def test_a_long_traceback_keeps_its_end(self, address: str) -> None:
        class Deep(Counting):
            def step(self, action: Any) -> Any:
                def descend(depth: int) -> None:
                    if depth == 0:
                        raise ValueError("the bottom " + "ä\n" * 2000 + "ends here")
                    descend(depth - 1)

                descend(100)

        error = self.failure(Deep, address)
        assert str(error).rstrip().endswith("ends here")

    def test_an_environment_that_cannot_be_made_says_why(self, address: str) -> None:
        def make() -> None:
            raise OSError("no ROM in the slot")

        error = self.failure(make, address)
        assert "OSError: no ROM in the slot" in str(error)

    def test_a_failing_reset_says_why(self, address: str) -> None:
        class Env(Counting):
            def reset(self, **kwargs: Any) -> Any:
                raise OSError("reset is stuck")

        error = self.failure(Env, address)
        assert "OSError: reset is stuck" in str(error)

    @pytest.mark.parametrize("reward", [float("nan"), float("inf"), -np.inf])
    def test_a_reward_that_is_no_number_is_named(self, reward: float, address: str) -> None:
        env = served_envs.with_step((np.zeros((2, 2), np.uint8), reward, False, False, {}))
        error = self.failure(env, address)
        assert re.search(r"reward -?(nan|inf)", str(error))

    @pytest.mark.parametrize(
        ("later", "sides"),
        [
            (np.zeros((2, 3), np.uint8), r"uint8\[2, 3\].*uint8\[2, 2\]"),
            (np.zeros((2, 2), np.float32), r"float32\[2, 2\].*uint8\[2, 2\]"),
            ((np.zeros((2, 2), np.uint8),), "nests don't match"),
            ({}, "nests don't match"),
        ],
        ids=["shape", "dtype", "structure", "empty"],
    )
    def test_a_changed_observation_is_named_with_both_sides(
        self, later: Any, sides: str, address: str
    ) -> None:
        first = np.zeros((2, 2), np.uint8)
        error = self.failure(served_envs.with_observations(first, first, later), address)
        assert re.search(sides, str(error))

    @pytest.mark.parametrize("observation", ["text", None, object(), (), {}, np.array([None])])
    def test_an_observation_that_cannot_be_sent_is_named(
        self, observation: Any, address: str
    ) -> None:
        error = self.failure(served_envs.with_observations(observation), address)
        assert re.search("got|empty", str(error))

    @pytest.mark.parametrize(
        "result",
        [None, 3, (), (1,), (1, 2), "text", (np.zeros((2, 2), np.uint8), "much", False, False, {})],
        ids=repr,
    )
    def test_a_step_that_returns_something_else_is_named(self, result: Any, address: str) -> None:
        error = self.failure(served_envs.with_step(result), address)
        assert type(error) is RuntimeError

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"reward": np.zeros(3)}, r"reward must be float32\[3\], got float64\[3\]"),
            ({"reward": np.zeros(2, np.float32)}, r"float32\[3\], got float32\[2\]"),
            ({"reward": np.array([0, np.nan, 0], np.float32)}, "reward nan"),
            ({"terminated": np.zeros(3, np.uint8)}, r"terminated must be bool\[3\], got uint8"),
            ({"truncated": np.zeros((3, 1), bool)}, r"truncated must be bool\[3\]"),
            ({"episode_end": [False] * 3}, "numpy.ndarray, got"),
            ({"observation": np.zeros((2, 1), np.int32)}, "first dimension of 3 environments"),
            ({"observation": np.zeros((3, 2), np.int32)}, r"int32\[3, 1\].*int32\[3, 2\]"),
            ({"truncated": np.ones(3, bool)}, "final observation"),
            (
                {"truncated": np.ones(3, bool), "final_observation": np.zeros((2, 1), np.int32)},
                r"int32\[3, 1\].*int32\[2, 1\]",
            ),
        ],
    )
    def test_a_bad_step_of_a_vector_environment_is_named(
        self, changes: dict[str, Any], text: str, address: str
    ) -> None:
        error = self.failure(served_envs.with_vec_step(**changes), address)
        assert re.search(text, str(error))

    def test_a_single_failing_stream_ends_the_run_with_its_address(
        self, runtime_folder: Path
    ) -> None:
        good, bad = (f"unix:{runtime_folder}/{name}" for name in ("good", "bad"))
        for addresses in ([good, good, bad], [bad, good, good]):
            with serving(Counting, good), serving(served_envs.Raising, bad):
                game = Game(addresses, queue_size=100)
                with pytest.raises(RuntimeError, match=f"{bad}: Traceback"):
                    game.end()
                game.close()

    def test_a_failure_reaches_run_while_inference_is_busy(self, runtime_folder: Path) -> None:
        good, bad = (f"unix:{runtime_folder}/{name}" for name in ("good", "bad"))
        Waiting.forget()
        busy, free = threading.Event(), threading.Event()

        def agent(inputs: Any) -> Any:
            if Waiting.inside.is_set():  # so this is the question of the good stream
                busy.set()
                free.wait(2 * SOON)
            return zeros_agent(inputs)

        with serving(Counting, good), serving(served_envs.WaitingThenRaising, bad):
            game = Game([good, bad], agent, queue_size=10**6)
            assert busy.wait(SOON)
            Waiting.go_on.set()
            with pytest.raises(RuntimeError, match=f"{bad}: Traceback"):
                game.end()
            free.set()
            game.close()

    def test_a_failure_reaches_run_while_other_streams_wait_for_room_in_the_queue(
        self, runtime_folder: Path
    ) -> None:
        good, bad = (f"unix:{runtime_folder}/{name}" for name in ("good", "bad"))
        Waiting.forget()
        with serving(Counting, good), serving(served_envs.WaitingThenRaising, bad):
            game = Game([good, bad], queue_size=1)
            assert Waiting.inside.wait(SOON)
            wait_for(lambda: game.queue.size() == 1)
            Waiting.go_on.set()
            with pytest.raises(RuntimeError, match=f"{bad}: Traceback"):
                game.end()
            game.close()


class TestEnding:
    @pytest.mark.parametrize("closed", ["queue", "batcher"])
    def test_closing_the_queue_or_the_batcher_ends_run_without_an_error(
        self, closed: str, address: str
    ) -> None:
        with serving(Counting, address):
            game = Game([address] * 2)
            game.rollout()
            getattr(game, closed).close()
            game.end()
            assert game.queue.is_closed() and game.batcher.is_closed()
            game.close()

    def test_closing_is_safe_at_any_moment_of_a_run(self, address: str) -> None:
        with serving(Counting, address):
            for _ in range(30):
                game = Game([address] * 2, queue_size=100)
                game.close()
                game.end()

    def test_closing_both_before_run_ends_it_at_once(self) -> None:
        queue, batcher = BatchingQueue(), DynamicBatcher()
        pool = ActorPool(2, queue, batcher, ["unix:/nobody"], ())
        queue.close()
        batcher.close()
        pool.run()

    def test_closing_ends_run_while_it_waits_for_a_server(self, runtime_folder: Path) -> None:
        game = Game([f"unix:{runtime_folder}/nobody"])
        assert not game._run.ended
        game.close()
        game.end()

    def test_closing_ends_run_while_an_environment_is_in_a_step(self, address: str) -> None:
        Waiting.forget()
        with serving(Waiting, address):
            game = Game([address])
            assert Waiting.inside.wait(SOON)
            game.close()
            game.end()
            Waiting.go_on.set()

    def test_run_may_be_called_once_only(self, address: str) -> None:
        with serving(Counting, address), playing([address]) as game:
            game.rollout()
            with pytest.raises(RuntimeError, match="once"):
                game.pool.run()

    def test_a_running_pool_does_not_block_the_interpreter(self, address: str) -> None:
        with serving(Counting, address), playing([address], queue_size=1) as game:
            wait_for(lambda: game.queue.size() == 1)  # these lines are Python, and run
            game.rollout()

    def test_ctrl_c_ends_run_in_the_main_thread(self, address: str) -> None:
        script = f"""
import signal
import libtorchbeast
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
pool = libtorchbeast.ActorPool(
    2, libtorchbeast.BatchingQueue(), libtorchbeast.DynamicBatcher(), [{address!r}], ())
try:
    print("running", flush=True)
    pool.run()
except KeyboardInterrupt:
    print("interrupted")
"""
        with _python(script) as process:
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=SOON)
        assert out == "interrupted\n" and process.returncode == 0


def _python(script: str) -> subprocess.Popen[str]:
    """A Python process that finds the tests' environments."""
    paths = [Path(libtorchbeast.__file__).parents[1], Path(served_envs.__file__).parent]
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
    )


class ServerProcess:
    """An environment server in a process, to be killed."""

    def __init__(self, address: str) -> None:
        self._process = _python(f"""
import threading, libtorchbeast, served_envs
server = libtorchbeast.Server(served_envs.Counting, {address!r})
threading.Thread(target=lambda: print(server.wait_until_serving(30), flush=True)).start()
server.run()
""")
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "True\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=SOON)


@pytest.fixture
def server(address: str) -> Iterator[ServerProcess]:
    server = ServerProcess(address)
    yield server
    server.kill()


class TestLostStreams:
    def test_an_address_without_a_server_is_a_connection_error(self, address: str) -> None:
        game = Game([address], connect_timeout_s=0.2)
        with pytest.raises(ConnectionError, match=f"no environment server answers at {address}"):
            game.end()
        game.close()

    def test_a_pool_waits_for_a_server_that_starts_later(self, address: str) -> None:
        with playing([address]) as game:
            assert game.pool.live_streams() == 0
            with serving(Counting, address):
                game.rollout()
                game.close()

    def test_a_killed_server_is_a_connection_error_after_the_reconnect_timeout(
        self, server: ServerProcess, address: str
    ) -> None:
        game = Game([address], reconnect_timeout_s=0.5, queue_size=10)
        game.rollouts(3)
        server.kill()
        while not game.queue.is_closed():
            for _ in game.queue:
                pass
        with pytest.raises(ConnectionError, match=address):
            game.end()
        game.close()
        assert game.pool.lost_streams() == 1 and game.pool.live_streams() == 0

    def test_the_run_continues_when_a_killed_server_comes_back(
        self, server: ServerProcess, address: str
    ) -> None:
        with playing([address] * 2) as game:
            wait_for(lambda: game.pool.live_streams() == 2)
            before = game.rollouts(4)
            server.kill()
            drain = Background(lambda: list(game.queue.with_info()))
            wait_for(lambda: [where for where, *_ in game.pool.away_streams()] == [address] * 2)
            assert game.pool.lost_streams() == 2
            short = game.pool.shortage()
            assert short is not None and short[:2] == (0, 1) and 0 < short[2] <= 60.0
            again = ServerProcess(address)
            count = game.pool.count()
            wait_for(lambda: game.pool.live_streams() == 2 and game.pool.count() > count + 8)
            assert game.pool.away_streams() == [] and game.pool.shortage() is None
            game.close()
            after = drain.result()
            again.kill()
        for nest, _ in [*before, *after]:
            steps = nest[0][0][3][:, 0].tolist()
            assert steps in _CYCLES, f"a rollout over the gap: {steps}"

    def test_a_pool_reconnects_to_a_stopped_server_that_runs_again(self, address: str) -> None:
        with playing([address], queue_size=10**6) as game:
            for lost in range(3):
                with serving(Counting, address):
                    wait_for(lambda: game.pool.live_streams() == 1)
                    assert game.pool.lost_streams() == lost
                wait_for(lambda: game.pool.lost_streams() == lost + 1)  # noqa: B023

    def test_the_run_continues_while_half_of_the_streams_are_live(
        self, server: ServerProcess, address: str, runtime_folder: Path
    ) -> None:
        other = f"unix:{runtime_folder}/other"
        with serving(Counting, other):
            with playing([address, other], reconnect_timeout_s=0.05) as game:
                wait_for(lambda: game.pool.live_streams() == 2)
                server.kill()
                drain = Background(lambda: list(game.queue))
                wait_for(lambda: game.pool.lost_streams() == 1)
                [(where, before, _)] = game.pool.away_streams()
                began = time.monotonic()
                count = game.pool.count()
                wait_for(lambda: game.pool.count() > count + 100)
                assert game.pool.live_streams() == 1
                at_least = time.monotonic() - began
                [(still, seconds, _)] = game.pool.away_streams()
                assert where == still == address and seconds - before >= at_least > 0
                game.close()
                drain.result()

    def test_a_step_that_takes_too_long_is_a_timeout_error(self, address: str) -> None:
        Waiting.forget()
        with serving(Waiting, address):
            game = Game([address], step_timeout_s=0.3)
            with pytest.raises(TimeoutError, match=f"{address} sent no step within"):
                game.end()
            Waiting.go_on.set()
            game.close()


class TestEnvironmentsThatFail:
    """After two rollouts, unlike those of TestFailures, which fail before the first."""

    def test_a_failure_is_reported_with_its_traceback_and_the_stream_plays_on(
        self, address: str
    ) -> None:
        with serving(RaisingLate, address), playing([address]) as game:
            rollouts = game.rollouts(5)
            wait_for(lambda: len(game.reports) >= 2)
            assert game.pool.restarted_streams() >= 2 and game.pool.lost_streams() == 0
            assert game.pool.retired_streams() == 0
            said = game.reports[1]
            assert said.startswith("stream 0 gets new environments after failure 2 within 600 s")
            assert address in said and "KeyError: 'the joystick is gone'" in said
            assert "served_envs.py" in said, "the traceback"
        numbers = [info["rollout"].item() for _, info in rollouts]
        assert numbers == [0, 1, 3, 4, 6], "one is left out at each failure"
        for nest, _ in rollouts:
            steps = nest[0][0][3][:, 0].tolist()
            assert steps in _CYCLES, f"a rollout over the gap: {steps}"

    def test_the_fifth_failure_within_ten_minutes_retires_the_stream(
        self, address: str, runtime_folder: Path
    ) -> None:
        other = f"unix:{runtime_folder}/other"
        with serving(RaisingLate, address), serving(Counting, other):
            with playing([address, other], queue_size=10**6) as game:
                wait_for(lambda: game.pool.retired_streams() == 1)
                wait_for(lambda: len(game.reports) == 5)
                assert "is retired after failure 5 within 600 s, 1 of 2 streams" in game.reports[4]
                assert game.pool.restarted_streams() == 4 and game.pool.live_streams() == 1
                count = game.pool.count()
                wait_for(lambda: game.pool.count() > count)

    def test_retired_streams_that_leave_too_few_end_the_run_with_the_traceback(
        self, address: str
    ) -> None:
        with serving(RaisingLate, address):
            game = Game([address], queue_size=10**6)
            with pytest.raises(RuntimeError, match="0 of 1 streams are left, .* needs 1") as error:
                game.end()
            game.close()
        assert "KeyError: 'the joystick is gone'" in str(error.value)

    def test_what_a_report_raises_ends_the_run(self, address: str) -> None:
        def full(_: str) -> None:
            raise OSError("the disk is full")

        queue, batcher = BatchingQueue(), DynamicBatcher(timeout_ms=10)
        pool = ActorPool(4, queue, batcher, [address], ())

        with serving(RaisingLate, address):
            agent = Background(answer, batcher)
            with pytest.raises(OSError, match="the disk is full"):
                pool.run(full)
            agent.result()

    def test_what_the_last_report_raises_takes_the_place_of_no_failure(self, address: str) -> None:
        queue, batcher = BatchingQueue(), DynamicBatcher(timeout_ms=10)
        pool = ActorPool(4, queue, batcher, [address], ())

        def report(text: str) -> None:
            if "after failure 1 " not in text:
                raise OSError("the disk is full")
            wait_for(queue.is_closed)  # by the fifth failure

        with serving(RaisingLate, address):
            agent = Background(answer, batcher)
            with pytest.raises(RuntimeError, match="the joystick is gone"):
                pool.run(report)
            agent.result()


def answer(batcher: DynamicBatcher) -> None:
    for batch in batcher:
        batch.set_outputs(zeros_agent(batch.get_inputs()))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# Counters of five rows of a gapless game with episodes of three steps.
_CYCLES = [[0, 1, 2, 3, 1], *([*([1, 2, 3] * 3)][first : first + 5] for first in range(3))]
