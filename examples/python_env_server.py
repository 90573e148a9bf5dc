# SPDX-License-Identifier: Apache-2.0
"""A minimal environment server in pure Python.

A learner accepts any server that implements the protocol in libtorchbeast/proto/rpcenv.proto. This
server needs only grpcio and numpy, and no compiled module of TorchBeast. Read it as a tutorial. You
can start from it if you cannot install TorchBeast, for example on a robot or in a game's own
Python, or if you write a server in another language.

    pip install grpcio grpcio-tools numpy
    python examples/python_env_server.py --address unix:/tmp/catch.0 --num_envs 8

In another terminal, start a learner that trains on its games:

    python -m torchbeast.polybeast_learner --pipes_basename unix:/tmp/catch

A learner looks for its servers at <basename>.0, <basename>.1, and so on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import grpc
import numpy as np

PROTO = Path(__file__).resolve().parents[1] / "libtorchbeast" / "proto" / "rpcenv.proto"

# ---- 1. The environment -------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The results of one step of all E games."""

    observation: np.ndarray  # float32 [E, 10, 5]; if a game ended, the next game's first
    reward: np.ndarray  # float32 [E]
    ended: np.ndarray  # bool [E]


class Catch:
    """E games of catching a falling ball with a paddle in the last row.

    An observation is 1 at the ball and the paddle, and 0 elsewhere. The actions are left, stay and
    right. The reward is 1 or -1 in the last of a game's nine steps, and 0 before. If a game ends, a
    new one starts in the same step.
    """

    rows, columns, num_actions = 10, 5, 3

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int | None) -> np.ndarray:
        """Returns the first observations; without a seed, the games are different every time."""
        self.random = np.random.default_rng(seed)
        self.row = np.zeros(self.num_envs, np.int64)
        self.ball = self.random.integers(self.columns, size=self.num_envs)
        self.paddle = np.full(self.num_envs, self.columns // 2)
        return self.draw()

    def step(self, action: np.ndarray) -> Outcome:
        """Steps all games. action: int64 [E]; each action is 0, 1 or 2."""
        self.paddle = np.clip(self.paddle + action - 1, 0, self.columns - 1)
        self.row += 1
        ended = self.row == self.rows - 1
        caught = np.where(self.ball == self.paddle, 1, -1)
        reward = np.where(ended, caught, 0).astype(np.float32)
        self.restart(ended)
        return Outcome(self.draw(), reward, ended)

    def restart(self, ended: np.ndarray) -> None:
        self.row[ended] = 0
        self.ball[ended] = self.random.integers(self.columns, size=ended.sum())
        self.paddle[ended] = self.columns // 2

    def draw(self) -> np.ndarray:
        board = np.zeros((self.num_envs, self.rows, self.columns), np.float32)
        env = np.arange(self.num_envs)
        board[env, self.row, self.ball] = 1
        board[env, -1, self.paddle] = 1
        return board


# ---- 2. The messages ----------------------------------------------------------------------------


def generated_modules(proto: Path) -> tuple[ModuleType, ModuleType]:
    """Returns the messages of rpcenv.proto and its service as Python modules.

    protoc writes them into a temporary folder. A server that you install would contain them, so
    that they are generated only once.
    """
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"-I{proto.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
        if protoc.main(["protoc", *arguments, str(proto)]) != 0:
            sys.exit(f"error: protoc could not read {proto}; name the file with --proto")
        sys.path.insert(0, folder)
        try:
            messages = importlib.import_module(f"{proto.stem}_pb2")
            return messages, importlib.import_module(f"{proto.stem}_pb2_grpc")
        finally:
            sys.path.remove(folder)


class Codec:
    """Converts between numpy arrays and messages.

    On the wire, an array consists of numpy's type number, its shape, and its bytes in C order.
    """

    def __init__(self, messages: ModuleType) -> None:
        self.messages = messages

    def array(self, array: np.ndarray) -> Any:
        """Returns the array as an NDArray message."""
        return self.messages.NDArray(dtype=array.dtype.num, shape=array.shape, data=array.tobytes())

    def nest(self, array: np.ndarray) -> Any:
        """Returns an ArrayNest with one leaf. A tuple would go into `vector`, a dict into `map`."""
        return self.messages.ArrayNest(array=self.array(array))

    def spec(self, dtype: type, shape: tuple[int, ...]) -> Any:
        """Returns an ArrayNest with dtype and shape but without data."""
        array = self.messages.NDArray(dtype=np.dtype(dtype).num, shape=shape)
        return self.messages.ArrayNest(array=array)

    def action(self, nest: Any, *shapes: tuple[int, ...]) -> np.ndarray:
        """Returns the discrete actions in an ArrayNest: int64, in one of the given shapes.

        Raises ValueError if the nest contains anything else, because a peer may send anything.
        """
        array = nest.array
        if not nest.HasField("array") or array.dtype != np.dtype(np.int64).num:
            raise ValueError("expected one array of int64 actions")
        if (shape := tuple(array.shape)) not in shapes or len(array.data) != 8 * np.prod(shape):
            raise ValueError(f"expected actions of shape {shapes[0]}, got {shape}")
        action = np.frombuffer(array.data, np.int64)
        if ((action < 0) | (action >= Catch.num_actions)).any():
            raise ValueError(f"expected actions from 0 to {Catch.num_actions - 1}, got {action}")
        return action


# ---- 3. The service -----------------------------------------------------------------------------


class Counters:
    """Counts the steps, and adds up the rewards, of each running episode."""

    def __init__(self, num_envs: int) -> None:
        self.steps = np.zeros(num_envs, np.int32)
        self.returns = np.zeros(num_envs, np.float32)
        self.ended = np.zeros(num_envs, bool)

    def add(self, outcome: Outcome) -> None:
        self.steps = np.where(self.ended, 0, self.steps).astype(np.int32) + np.int32(1)
        self.returns = np.where(self.ended, np.float32(0), self.returns) + outcome.reward
        self.ended = outcome.ended


class EnvServer:
    """Implements the three methods of the service. gRPC runs each call in a separate thread."""

    def __init__(self, messages: ModuleType, num_envs: int, num_streams: int) -> None:
        self.messages = messages
        self.codec = Codec(messages)
        self.num_envs = num_envs
        self.num_streams = num_streams

    def Describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Describes the environment. A learner calls this first, in order to build its model."""
        return self.messages.Description(
            protocol_version=1,
            env_id="Catch",
            num_envs=self.num_envs,
            num_streams=self.num_streams,
            frame_stack=1,
            observation=self.codec.spec(np.float32, (Catch.rows, Catch.columns)),
            action_space=json.dumps({"type": "Discrete", "n": Catch.num_actions, "start": 0}),
        )

    def StreamingVectorEnv(
        self, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Plays num_envs games with TorchBeast's learner, with one message per step for all games.

        The learner's first message contains the seed, and the answer the first observations. Every
        later message contains actions, and the answer their results. When the learner is done, it
        half-closes the stream, and `requests` ends.
        """
        if (first := next(requests, None)) is None:
            return  # the learner left without sending anything
        env, counters = Catch(self.num_envs), Counters(self.num_envs)
        observation = env.reset(first.seed)
        no_reward = np.zeros(self.num_envs, np.float32)
        started = Outcome(observation, no_reward, np.zeros(self.num_envs, bool))
        # In the first message, "terminated" marks the start of an episode, although none has ended.
        yield self.vector_step(started, counters, terminated=np.ones(self.num_envs, bool))
        for request in requests:
            action = self.checked(context, request.nest_action, (self.num_envs,))
            outcome = env.step(action)
            counters.add(outcome)
            yield self.vector_step(outcome, counters, terminated=outcome.ended)

    def StreamingEnv(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Plays one game with a learner of the original TorchBeast. The server sends first."""
        env, counters = Catch(1), Counters(1)
        observation = env.reset(seed=None)
        yield self.messages.Step(observation=self.codec.nest(observation[0]), done=True)
        for request in requests:
            # The action is a scalar; some learners put time and batch dimensions before it.
            outcome = env.step(self.checked(context, request.nest_action, (), (1, 1)))
            counters.add(outcome)
            yield self.messages.Step(
                observation=self.codec.nest(outcome.observation[0]),
                reward=outcome.reward[0],
                done=outcome.ended[0],
                episode_step=counters.steps[0],
                episode_return=counters.returns[0],
            )

    def vector_step(self, outcome: Outcome, counters: Counters, terminated: np.ndarray) -> Any:
        """Returns one message with the results of all games.

        Catch does not have a time limit. If a game reaches its time limit, a server sets
        `truncated` instead of `terminated`, and adds `final_observation`: the last observations of
        the truncated games.
        """
        array = self.codec.array
        return self.messages.VectorStep(
            observation=self.codec.nest(outcome.observation),
            reward=array(outcome.reward),
            terminated=array(terminated),
            truncated=array(np.zeros(self.num_envs, bool)),
            episode_end=array(outcome.ended),
            episode_step=array(counters.steps),
            episode_return=array(counters.returns),
        )

    def checked(
        self, context: grpc.ServicerContext, nest: Any, *shapes: tuple[int, ...]
    ) -> np.ndarray:
        """Returns the action, or aborts the stream with the reason."""
        try:
            return self.codec.action(nest, *shapes)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise  # not reached: abort() raises


# ---- 4. The program -----------------------------------------------------------------------------


def serve(address: str, num_envs: int, num_streams: int, proto: Path) -> grpc.Server:
    """Starts a server. Each stream occupies a thread until it ends; four more threads are spare."""
    messages, services = generated_modules(proto)
    server = grpc.server(
        futures.ThreadPoolExecutor(num_streams + 4),
        options=[
            ("grpc.max_receive_message_length", 256 << 20),
            ("grpc.so_reuseport", 0),
            # Over TCP, learners ping in every 20 s of silence, which gRPC would take for an attack.
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            # A learner that vanishes must not occupy a thread for hours.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
        ],
    )
    service = EnvServer(messages, num_envs, num_streams)
    services.add_RPCEnvServerServicer_to_server(service, server)
    server.add_insecure_port(address)
    server.start()
    return server


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serves games of Catch to TorchBeast's learners.")
    parser.add_argument("--address", required=True, help="unix:/path/of/socket.0 or host:port")
    parser.add_argument("--num_envs", type=int, default=8, help="games in one stream")
    parser.add_argument(
        "--num_streams", type=int, default=1, help="streams that a learner opens at once"
    )
    parser.add_argument("--proto", type=Path, default=PROTO, help="path of rpcenv.proto")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server = serve(args.address, args.num_envs, args.num_streams, args.proto)
    print(f"Serving {args.num_streams} x {args.num_envs} games at {args.address}", flush=True)
    stopped.wait()
    server.stop(grace=1).wait()


if __name__ == "__main__":
    main()
