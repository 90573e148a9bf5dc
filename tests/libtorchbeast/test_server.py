# SPDX-License-Identifier: Apache-2.0
"""Server: which environments it serves, where, and how it ends."""

from __future__ import annotations

import contextvars
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import served_envs
import wire
from background import SOON, Background, wait_for
from peers import RawStream
from served_envs import (
    EPISODE_LENGTH,
    REWARD,
    Counting,
    Legacy,
    Raising,
    Recording,
    Vector,
    Waiting,
)
from serving import Game, playing, serving

import libtorchbeast
from libtorchbeast import Server

ENDINGS = 20


@pytest.fixture(autouse=True)
def forget() -> None:
    Recording.forget()
    Waiting.forget()


def path_of(address: str) -> Path:
    return Path(address.removeprefix("unix:"))


def observations(nest: Any) -> list[int]:
    """Returns the counters in a rollout of one environment."""
    return nest[0][0][0].flatten(2)[:, 0, 0].tolist()


class TestEnvironments:
    @pytest.mark.parametrize(
        "values",
        [({},), (), (None,), ({}, "more"), (0, 1, 2), ({}, {}, {})],
        ids=["four values", "three", "no info", "five", "six", "six with infos"],
    )
    def test_environments_of_old_gym_are_served_whatever_follows_done(
        self, values: tuple[Any, ...], address: str
    ) -> None:
        env = type("Env", (Legacy,), {"values": values})
        with serving(env, address), playing([address], unroll_length=5) as game:
            nest, info = game.rollout()
        assert observations(nest) == [0, 1, 2, 0, 1, 2]
        assert info["terminated"].flatten().tolist() == [True, False, False, True, False, False]
        assert not info["truncated"].any()

    def test_environments_of_gymnasium_are_served(self, address: str) -> None:
        with serving(Counting, address), playing([address], unroll_length=5) as game:
            nest, _ = game.rollout()
        (observation, reward, done, episode_step, episode_return), _ = nest[0]
        assert observation.shape == (6, 1, 2, 2)
        assert observations(nest) == [0, 1, 2, 0, 1, 2]
        assert reward.flatten().tolist() == [0, *[REWARD] * 5]
        assert done.flatten().tolist() == [True, False, False, True, False, False]
        assert episode_step.flatten().tolist() == [0, 1, 2, 3, 1, 2]
        assert episode_return.flatten().tolist() == [0, 2, 4, 6, 2, 4]

    def test_vector_environments_are_served(self, address: str) -> None:
        with serving(Vector, address), playing([address], unroll_length=4) as game:
            nest, _ = game.rollout()
        observation = nest[0][0][0]
        assert observation.shape == (5, Vector.num_envs, 1)
        assert observation[:, 2, 0].tolist() == [20, 21, 22, 20, 21]

    @pytest.mark.parametrize(("truncated", "flag"), [(True, True), (False, False)])
    def test_the_time_limit_of_old_gym_truncates(
        self, truncated: bool, flag: bool, address: str
    ) -> None:
        env = type("Env", (Legacy,), {"values": ({"TimeLimit.truncated": truncated},)})
        with serving(env, address), playing([address]) as game:
            nest, info = game.rollout()
        assert info["truncated"][EPISODE_LENGTH, 0].item() is flag
        assert info["terminated"][EPISODE_LENGTH, 0].item() is not flag
        assert info["final_observation"].shape[1] == int(flag)
        assert observations(nest)[EPISODE_LENGTH] == 0

    def test_a_truncated_episodes_last_observation_is_its_own(self, address: str) -> None:
        env = type("Env", (Counting,), {"ending": lambda self, over: (False, over)})
        with serving(env, address), playing([address]) as game:
            _, info = game.rollout()
        assert info["final_observation"].shape == (1, 1, 2, 2)
        assert (info["final_observation"] == EPISODE_LENGTH).all()
        assert info["episode_end"][EPISODE_LENGTH, 0].item() is True

    def test_an_episode_that_ends_both_ways_is_terminated(self, address: str) -> None:
        env = type("Env", (Counting,), {"ending": lambda self, over: (over, over)})
        with serving(env, address), playing([address]) as game:
            _, info = game.rollout()
        assert info["terminated"][EPISODE_LENGTH].item() and not info["truncated"].any()

    def test_a_lost_life_is_done_but_counters_go_on_to_the_games_end(self, address: str) -> None:
        with serving(served_envs.Lives, address), playing([address]) as game:
            nest, info = game.rollout()
        (_, _, done, episode_step, _), _ = nest[0]
        assert done.all()
        assert episode_step[:, 0].tolist() == [0, 1, 2, 3, 1]
        assert info["episode_end"][:, 0].tolist() == [False, False, False, True, False]

    def test_environments_are_made_once_per_connection_and_closed_with_it(
        self, address: str
    ) -> None:
        description = {
            "env_id": "Recording",
            "num_envs": 1,
            "num_streams": 1,
            "frame_stack": 1,
            "observation": ("uint8", (2, 2)),
            "action_space": None,
        }
        made = []

        def make() -> Recording:
            made.append(Recording())
            return made[-1]

        with serving(make, address, description=description):
            assert made == []
            for connections in (1, 2):
                with playing([address]) as game:
                    game.rollout()
                wait_for(lambda: len(Recording.closed) == connections)  # noqa: B023
                assert len(made) == connections

    @pytest.mark.parametrize("vector", [False, True], ids=["one", "many"])
    def test_environments_keep_their_thread_local_objects(self, vector: bool, address: str) -> None:
        base = Vector if vector else Counting

        class Env(base):  # type: ignore[misc, valid-type]
            """Fails in the first step in which an object is missing."""

            def __init__(self) -> None:
                super().__init__()
                local.owner = self
                variable.set(self)
                np.seterr(under="raise")

            def step(self, action: Any) -> Any:
                assert local.owner is self, "threading.local"
                assert variable.get() is self, "contextvars"
                assert np.geterr()["under"] == "raise", "numpy's error state"
                return super().step(action)

        local = threading.local()
        variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default=None)
        with serving(Env, address), playing([address] * 2) as game:
            game.rollouts(4)

    def test_environments_leave_no_thread_local_objects(self, address: str) -> None:
        class Kept:
            pass

        class Env(Counting):
            def __init__(self) -> None:
                super().__init__()
                local.kept = Kept()
                kept.append(weakref.ref(local.kept))

        local = threading.local()
        kept: list[weakref.ref[Kept]] = []
        with serving(Env, address):
            with playing([address] * 2) as game:
                game.rollouts(4)
                assert any(reference() for reference in kept)
            wait_for(lambda: not any(reference() for reference in kept))

    def test_environments_get_a_discrete_action_as_a_0_d_int64_array(self, address: str) -> None:
        def agent(inputs: Any) -> Any:
            return (np.full((1, 1), 2, np.int64),), ()

        with serving(Recording, address), playing([address], agent) as game:
            game.rollout()
        action = Recording.actions[0]
        assert isinstance(action, np.ndarray)
        assert action.shape == () and action.dtype == np.int64 and action == 2

    def test_environments_get_nested_actions_of_any_dtype(self, address: str) -> None:
        def agent(inputs: Any) -> Any:
            action = {"move": np.full((1, 1, 2), 0.5, np.float32), "keys": [np.ones((1, 1), bool)]}
            return (action,), ()

        with serving(Recording, address), playing([address], agent) as game:
            nest, _ = game.rollout()
        action = Recording.actions[0]
        assert action["move"].tolist() == [0.5, 0.5] and action["move"].dtype == np.float32
        assert type(action["keys"]) is tuple and action["keys"][0].dtype == bool
        assert nest[0][1][0]["move"].shape == (5, 1, 2)

    def test_environments_may_write_to_their_actions(self, address: str) -> None:
        class Env(Counting):
            def step(self, action: Any) -> Any:
                action[...] = 3
                return super().step(action)

        with serving(Env, address), playing([address]) as game:
            nest, _ = game.rollout()
        assert not nest[0][1][0].any()

    def test_every_environment_gets_a_seed_of_its_own(self, address: str) -> None:
        with serving(Recording, address), playing([address] * 3, seed=5) as game:
            wait_for(lambda: game.pool.live_streams() == 3)
            game.rollout()
        seeds = [seed for seed in Recording.seeds if seed]  # Describe's own environment has 0
        assert len(set(seeds)) == 3 and all(0 < seed < 2**31 for seed in seeds)
        Recording.forget()
        with serving(Recording, address), playing([address] * 3, seed=5) as game:
            wait_for(lambda: game.pool.live_streams() == 3)
        assert {seed for seed in Recording.seeds if seed} == set(seeds), "the same seed, other ones"

    def test_vector_environments_get_seeds_that_numpys_random_state_takes(
        self, address: str
    ) -> None:
        class Env(Vector):
            def reset(self, seed: int) -> Any:
                Recording.seeds.append(seed)
                return super().reset(seed)

        with serving(Env, address), playing([address] * 3, seed=5) as game:
            game.rollout()
        seeds = [seed for seed in Recording.seeds if seed]
        assert seeds and all(0 < seed < 2**31 for seed in seeds)

    def test_environments_whose_reset_takes_any_keyword_get_a_seed(self, address: str) -> None:
        class Env(Recording):
            def reset(self, **kwargs: Any) -> Any:
                return super().reset(**kwargs)

        with serving(Env, address), playing([address]) as game:
            game.rollout()
        assert any(Recording.seeds)

    def test_environments_whose_reset_has_no_signature_get_no_seed(self, address: str) -> None:
        class Env(Legacy):
            def __init__(self) -> None:
                super().__init__()
                self.reset = {"reset": np.zeros((2, 2), np.uint8)}.copy  # a function of C

            def step(self, action: Any) -> tuple[Any, ...]:
                return {"reset": np.ones((2, 2), np.uint8)}, 0.0, False, {}

        class Unreadable(Env):
            def __init__(self) -> None:
                super().__init__()
                self.reset = type("Reset", (), {"__call__": self.reset, "__signature__": 3})()

        for env in (Env, Unreadable):
            with serving(env, address), playing([address]) as game:
                nest, _ = game.rollout()
            assert nest[0][0][0]["reset"][1].all()

    def test_a_traceback_arrives_though_utf_8_lacks_some_of_its_characters(
        self, address: str
    ) -> None:
        class Env(Counting):
            def step(self, action: Any) -> tuple[Any, ...]:
                raise FileNotFoundError(os.fsdecode(b"caf\xe9.rom"))

        with serving(Env, address), pytest.raises(RuntimeError) as failure:
            with playing([address]) as game:
                game.rollout()
        assert "in step" in str(failure.value)
        assert str(failure.value).rstrip().endswith(r"FileNotFoundError: caf\udce9.rom")

    def test_an_exception_that_cannot_be_printed_arrives_by_its_name(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any) -> list[str]:
            raise ValueError(args)

        with monkeypatch.context() as patch, serving(Raising, address):
            patch.setattr("traceback.format_exception", fail)
            game = Game([address])
            with pytest.raises(RuntimeError) as failure:
                game.end()
            game.close()
        assert str(failure.value).endswith(": KeyError, whose traceback cannot be printed")

    def test_an_error_quotes_what_utf_8_lacks(self, address: str) -> None:
        odd = type("Odd", (), {"__repr__": lambda self: "\udc80"})()
        env = type("Env", (Vector,), {"num_envs": odd})
        with serving(env, address), pytest.raises(RuntimeError) as failure:
            with playing([address]) as game:
                game.rollout()
        assert str(failure.value).endswith(r"num_envs must be an integer, got \udc80")

    def test_environments_are_seeded_only_once_in_a_stream(self, address: str) -> None:
        with serving(Recording, address), playing([address], unroll_length=9) as game:
            game.rollout()
        assert sum(bool(seed) for seed in Recording.seeds) == 1
        assert Recording.seeds.count(None) >= 3


@pytest.mark.parametrize(
    ("observation", "shape", "dtype"),
    [
        (3, (), "int64"),
        (2.5, (), "float64"),
        (True, (), "bool"),
        (np.float32(3), (), "float32"),
        (np.ones((2, 3), np.uint8, order="F"), (2, 3), "uint8"),
        (np.arange(12.0).reshape(3, 4)[:, ::-2], (3, 2), "float64"),
        (np.zeros((0, 3), np.int16), (0, 3), "int16"),
        (np.ones((2, 0), np.float16), (2, 0), "float16"),
    ],
    ids=["int", "float", "bool", "scalar", "fortran", "view", "no rows", "no columns"],
)
def test_observations_of_any_layout_are_sent(
    observation: Any, shape: tuple[int, ...], dtype: str, address: str
) -> None:
    with serving(served_envs.with_observations(observation), address), playing([address]) as game:
        nest, _ = game.rollout()
    sent = nest[0][0][0]
    assert sent.shape == (5, 1, *shape) and str(sent.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(sent[2, 0].numpy(), observation)


def test_observations_are_nests(address: str) -> None:
    observation = {"b": [np.ones(2), (3,)], "a": {"x": np.zeros((1, 2), np.uint8)}}
    with serving(served_envs.with_observations(observation), address), playing([address]) as game:
        nest, _ = game.rollout()
    sent = nest[0][0][0]
    assert list(sent) == ["a", "b"] and type(sent["b"]) is tuple
    assert sent["b"][1][0].shape == (5, 1) and sent["a"]["x"].shape == (5, 1, 1, 2)


def test_an_environment_may_reuse_its_buffer(address: str) -> None:
    class Reusing(Counting):
        buffer = np.zeros((2, 2), np.uint8)

        def observation(self) -> Any:
            self.buffer[...] = self.time
            return self.buffer

        def ending(self, over: bool) -> tuple[bool, bool]:
            return False, over

    with serving(Reusing, address), playing([address], unroll_length=5) as game:
        nest, info = game.rollout()
    assert observations(nest) == [0, 1, 2, 0, 1, 2]
    assert (info["final_observation"] == EPISODE_LENGTH).all()


@pytest.mark.parametrize("reward", [1, 1.5, True, np.float64(2), np.array(2.5), np.int32(3)])
def test_rewards_of_any_number_type_are_sent(reward: Any, address: str) -> None:
    env = served_envs.with_step((np.zeros(1), reward, False, False, {}))
    env.observation = lambda self: np.zeros(1)  # type: ignore[method-assign]
    with serving(env, address), playing([address]) as game:
        nest, _ = game.rollout()
    assert nest[0][0][1].flatten().tolist() == [0, *[float(reward)] * 4]


def test_the_return_of_a_long_episode_still_grows(address: str) -> None:
    """A float of 2**24 does not grow by 1."""

    class Rewarding(Counting):
        def step(self, action: Any) -> tuple[Any, ...]:
            self.time += 1
            return self.observation(), 2.0**24 if self.time == 1 else 1.0, False, False, {}

    with serving(Rewarding, address), playing([address]) as game:
        nest, _ = game.rollout()
    assert nest[0][0][4].flatten()[3] == 2**24 + 2


class TestEnding:
    def test_stop_before_run_is_an_error(self, address: str) -> None:
        with pytest.raises(RuntimeError) as failure:
            Server(Counting, address).stop()
        assert str(failure.value) == "Server not running"

    def test_a_second_run_is_an_error(self, address: str) -> None:
        with serving(Counting, address) as server:
            with pytest.raises(RuntimeError) as failure:
                server.run()
            assert str(failure.value) == "Server already running"

    def test_a_stopped_server_can_run_again(self, address: str) -> None:
        server = Server(Counting, address)
        for _ in range(3):
            run = Background(server.run)
            assert server.wait_until_serving(SOON)
            with playing([address]) as game:
                game.rollout()
            server.stop()
            run.result()
        with pytest.raises(RuntimeError, match="^Server not running$"):
            server.stop()

    def test_stop_is_safe_at_any_moment_of_run(self, address: str) -> None:
        for _ in range(ENDINGS):
            server = Server(Counting, address)
            run = Background(server.run)
            while not run.ended:
                try:
                    server.stop()
                except RuntimeError as error:
                    assert str(error) == "Server not running"
            run.result()

    def test_a_server_stops_with_clients_connected(self, address: str) -> None:
        with serving(Vector, address) as server:
            with RawStream(address, "StreamingVectorEnv") as idle:
                idle.send(wire.vector_action(seed=1))
                idle.read()
                Background(server.stop).result()
                code, _ = idle.end()
        assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        assert not path_of(address).exists()

    def test_a_server_stops_while_a_pool_runs(self, address: str) -> None:
        for _ in range(5):
            with serving(Counting, address) as server:
                with playing([address] * 2) as game:
                    wait_for(lambda: game.pool.live_streams() == 2)
                    game.rollouts(3)
                    Background(server.stop).result()

    def test_a_starting_pool_waits_for_a_server_to_run_again(self, address: str) -> None:
        class Env(Counting):
            def reset(self, **kwargs: Any) -> Any:
                inside.set()
                go_on.wait(SOON)
                return super().reset(**kwargs)

        for _ in range(3):
            inside, go_on = threading.Event(), threading.Event()
            with serving(Env, address) as server, playing([address]) as game:
                assert inside.wait(SOON)
                stopping = Background(server.stop)
                wait_for(lambda: not path_of(address).exists())
                go_on.set()
                stopping.result()
                assert game.pool.lost_streams() == 0
                with serving(Counting, address):
                    game.rollout()

    def test_a_signal_handler_may_stop_the_server_that_its_own_thread_runs(
        self, address: str
    ) -> None:
        program = f"""
import os, signal, threading
from libtorchbeast import Server

def interrupt():
    server.wait_until_serving({SOON})
    os.kill(os.getpid(), signal.SIGTERM)

server = Server(object, {address!r})
signal.signal(signal.SIGTERM, lambda *_: server.stop())
threading.Thread(target=interrupt).start()
server.run()
print("run() has ended")
"""
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(Path(libtorchbeast.__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=SOON,
        )
        assert ended.stdout == "run() has ended\n", ended.stderr

    def test_stop_waits_for_a_running_step(self, address: str) -> None:
        with serving(Waiting, address) as server, RawStream(address) as stream:
            stream.read()
            for _ in range(2):
                stream.send(wire.discrete_action())
            assert Waiting.inside.wait(SOON)
            stopping = Background(server.stop)
            assert not stopping.ended
            Waiting.go_on.set()
            stopping.result()

    def test_a_hanging_environment_is_abandoned_and_the_address_becomes_free(
        self, address: str
    ) -> None:
        closed = threading.Event()
        env = type("Env", (Waiting,), {"close": lambda self: closed.set()})
        server = Server(env, address, stop_timeout_s=0.05)
        run = Background(server.run)
        assert server.wait_until_serving(SOON)
        with RawStream(address) as stream:
            stream.read()
            for _ in range(2):
                stream.send(wire.discrete_action())
            assert Waiting.inside.wait(SOON)
            with pytest.raises(TimeoutError, match=f"{address}: an environment .* step 50 ms"):
                server.stop()
            run.result()
        with serving(Counting, address), playing([address]) as game:
            game.rollout()
        assert not closed.is_set()
        Waiting.go_on.set()
        assert closed.wait(SOON)

    def test_a_server_in_a_step_does_not_block_the_interpreter(self, address: str) -> None:
        with serving(Waiting, address), RawStream(address) as stream:
            stream.read()
            for _ in range(2):
                stream.send(wire.discrete_action())
            assert Waiting.inside.wait(SOON)  # this line is Python, and runs
            Waiting.go_on.set()
            stream.read()

    def test_wait_until_serving_returns_false_if_the_server_does_not_run(
        self, address: str
    ) -> None:
        server = Server(Counting, address)
        assert server.wait_until_serving(0.01) is False
        with serving(Counting, address) as server:
            assert server.wait_until_serving(0.01) is True

    def test_a_server_that_never_ran_is_deleted_quietly(self, address: str) -> None:
        server = Server(Counting, address)
        del server
        assert not path_of(address).exists()

    def test_a_deleted_server_releases_the_environment_class(self, address: str) -> None:
        def make() -> Counting:
            return Counting()

        before = sys.getrefcount(make)
        with serving(make, address) as server:
            with playing([address]) as game:
                game.rollout()
        del server, game
        assert sys.getrefcount(make) == before


@pytest.fixture
def listening(runtime_folder: Path) -> Iterator[str]:
    """Returns the address of a socket that another process serves."""
    path = runtime_folder / "other"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield f"unix:{path}"


class TestAddress:
    def test_the_socket_file_is_removed_at_the_end(self, address: str) -> None:
        with serving(Counting, address):
            assert stat.S_ISSOCK(path_of(address).stat().st_mode)
        assert not path_of(address).exists()

    def test_the_socket_file_of_a_killed_server_is_taken_over(self, address: str) -> None:
        leftover = socket.socket(socket.AF_UNIX)
        leftover.bind(str(path_of(address)))
        leftover.close()
        assert path_of(address).exists()
        with serving(Counting, address), playing([address]) as game:
            game.rollout()

    def test_an_address_in_use_is_refused_and_its_server_continues(self, address: str) -> None:
        with serving(Counting, address), playing([address]) as game:
            with pytest.raises(
                ConnectionError, match=f"{re.escape(address)}: process {os.getpid()} serves it"
            ):
                Server(Counting, address).run()
            assert path_of(address).exists()
            game.rollouts(3)
            with playing([address]) as another:
                another.rollout()

    def test_the_same_path_in_another_folder_is_another_address(self, runtime_folder: Path) -> None:
        """Jobs on a machine may each have a /tmp of their own."""
        folder = runtime_folder / "tmp"
        folder.mkdir()
        address = f"unix:{folder}/a"
        with serving(Counting, address):
            folder.rename(runtime_folder / "other")
            folder.mkdir()
            with serving(Counting, address), playing([address]) as game:
                game.rollout()
        (runtime_folder / "other" / "a").unlink(missing_ok=True)

    def test_an_address_where_any_process_listens_is_refused(self, listening: str) -> None:
        with pytest.raises(ConnectionError, match=re.escape(listening)):
            Server(Counting, listening).run()
        assert path_of(listening).exists()

    def test_a_file_that_is_no_socket_is_not_removed(self, address: str) -> None:
        path_of(address).write_text("mine")
        with pytest.raises(ConnectionError, match=f"{re.escape(address)}.*not a socket"):
            Server(Counting, address).run()
        assert path_of(address).read_text() == "mine"

    def test_a_missing_folder_of_a_socket_is_reported(self, runtime_folder: Path) -> None:
        with pytest.raises(ConnectionError, match=f"{runtime_folder}/none does not exist"):
            Server(Counting, f"unix:{runtime_folder}/none/env").run()

    def test_a_path_too_long_for_a_socket_is_refused(self, runtime_folder: Path) -> None:
        longest = f"{runtime_folder}/".ljust(107, "x")
        with serving(Counting, f"unix:{longest}"), playing([f"unix:{longest}"]) as game:
            game.rollout()
        with pytest.raises(ConnectionError, match="107 bytes, this one has 108"):
            Server(Counting, f"unix:{longest}x").run()

    @pytest.mark.parametrize(
        "unbindable", ["192.0.2.1:0", "127.0.0.1:99999", "nonsense::address", "unix:"]
    )
    def test_an_address_that_cannot_be_bound_is_reported(self, unbindable: str) -> None:
        with pytest.raises(ConnectionError, match=re.escape(unbindable)):
            with serving(Counting, unbindable):
                pass

    def test_a_tcp_port_in_use_is_reported(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            busy = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ConnectionError, match=re.escape(busy)):
                Server(Counting, busy).run()

    def test_a_server_can_listen_on_tcp(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            tcp = f"127.0.0.1:{free.getsockname()[1]}"
        with serving(Counting, tcp), playing([tcp]) as game:
            game.rollout()

    def test_a_failed_run_can_be_repeated_when_the_address_is_free(self, listening: str) -> None:
        server = Server(Counting, listening)
        with pytest.raises(ConnectionError):
            server.run()
        path_of(listening).unlink()
        run = Background(server.run)
        assert server.wait_until_serving(SOON)
        server.stop()
        run.result()

    def test_of_many_servers_at_one_address_exactly_one_serves(self, address: str) -> None:
        barrier = threading.Barrier(3)
        servers = [Server(Counting, address) for _ in range(3)]

        def run(server: Server) -> bool:
            barrier.wait(SOON)
            try:
                server.run()
            except ConnectionError:
                return False
            return True

        runs = [Background(run, server) for server in servers]
        wait_for(lambda: sum(run.ended for run in runs) == 2)
        with playing([address]) as game:
            game.rollout()
        for server in servers:
            if server.wait_until_serving(0.001):
                server.stop()
        assert sum(run.result() for run in runs) == 1


def test_a_server_process_never_imports_torch(address: str) -> None:
    script = f"""
import sys, threading
sys.path[:0] = [{os.path.dirname(served_envs.__file__)!r}]
import libtorchbeast, served_envs
server = libtorchbeast.Server(served_envs.Counting, {address!r})
run = threading.Thread(target=server.run)
run.start()
assert server.wait_until_serving(30)
print("serving", flush=True)
sys.stdin.read()
server.stop()
run.join()
print("torch" in sys.modules)
"""
    root = Path(libtorchbeast.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        with playing([address]) as game:
            game.rollouts(3)
        out, _ = process.communicate(timeout=SOON)
    assert out == "False\n" and process.returncode == 0
