# SPDX-License-Identifier: Apache-2.0
"""An environment server in pure Python: what a learner expects of one, and nothing else.

A learner neither knows nor cares what serves its environments, as long as it speaks the protocol of
libtorchbeast/proto/rpcenv.proto. This file does so with grpcio and numpy, without any compiled part
of TorchBeast. Read it as a tutorial, and start from it where TorchBeast cannot be installed: on the
robot, in the game's own Python, or as a model for a server in another language.

    pip install grpcio grpcio-tools numpy
    python examples/python_env_server.py --address unix:/tmp/catch.0 --num_envs 8

and, in another terminal, a learner that trains from it:

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
    """What one step of all E games gave."""

    observation: np.ndarray  # float32 [E, 10, 5]; of the next game where one ended
    reward: np.ndarray  # float32 [E]
    ended: np.ndarray  # bool [E]


class Catch:
    """E games at once: a ball falls, the paddle in the last row has to be under it.

    An observation is 1 where ball and paddle are. The actions are left, stay, right. The reward is
    1 or -1 in the last of a game's nine steps. A game that ended starts anew in the same step.
    """

    rows, columns, num_actions = 10, 5, 3

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int | None) -> np.ndarray:
        """The first observation. None: another game every time."""
        self.random = np.random.default_rng(seed)
        self.row = np.zeros(self.num_envs, np.int64)
        self.ball = self.random.integers(self.columns, size=self.num_envs)
        self.paddle = np.full(self.num_envs, self.columns // 2)
        return self.draw()

    def step(self, action: np.ndarray) -> Outcome:
        """action: int64 [E], each 0, 1 or 2."""
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
    """The messages of rpcenv.proto, and its service, as Python modules.

    protoc writes them into a folder that is gone when they are imported. A server that is installed
    somewhere would generate them once and ship them.
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
    """Between numpy arrays and messages.

    On the wire an array is numpy's type number, its shape, and its bytes in C order.
    """

    def __init__(self, messages: ModuleType) -> None:
        self.messages = messages

    def array(self, array: np.ndarray) -> Any:
        """NDArray."""
        return self.messages.NDArray(dtype=array.dtype.num, shape=array.shape, data=array.tobytes())

    def nest(self, array: np.ndarray) -> Any:
        """ArrayNest with one leaf. A tuple of arrays would go into `vector`, a dict into `map`."""
        return self.messages.ArrayNest(array=self.array(array))

    def spec(self, dtype: type, shape: tuple[int, ...]) -> Any:
        """ArrayNest that tells dtype and shape, without data."""
        array = self.messages.NDArray(dtype=np.dtype(dtype).num, shape=shape)
        return self.messages.ArrayNest(array=array)

    def action(self, nest: Any, *shapes: tuple[int, ...]) -> np.ndarray:
        """The discrete actions in an ArrayNest, int64 [E]. ValueError for anything else: peers can
        err. The array must have one of the shapes.
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
    """Steps and return of each running episode. A step includes itself, also the last one."""

    def __init__(self, num_envs: int) -> None:
        self.steps = np.zeros(num_envs, np.int32)
        self.returns = np.zeros(num_envs, np.float32)
        self.ended = np.zeros(num_envs, bool)

    def add(self, outcome: Outcome) -> None:
        self.steps = np.where(self.ended, 0, self.steps).astype(np.int32) + np.int32(1)
        self.returns = np.where(self.ended, np.float32(0), self.returns) + outcome.reward
        self.ended = outcome.ended


class EnvServer:
    """The three methods of the service. gRPC calls each in a thread of its own."""

    def __init__(self, messages: ModuleType, num_envs: int, num_streams: int) -> None:
        self.messages = messages
        self.codec = Codec(messages)
        self.num_envs = num_envs
        self.num_streams = num_streams

    def Describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        """What a learner asks first, to build its model: nobody has to type any shapes."""
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
        """What TorchBeast's learner plays: num_envs games, one message a step for all of them.

        The learner's first message brings the seed. It is answered with the first observation, each
        later one with what its action led to. When the learner has enough it half-closes, and
        `requests` ends.
        """
        if (first := next(requests, None)) is None:
            return  # it left without a word
        env, counters = Catch(self.num_envs), Counters(self.num_envs)
        observation = env.reset(first.seed)
        nothing = np.zeros(self.num_envs, np.float32)
        started = Outcome(observation, nothing, np.zeros(self.num_envs, bool))
        # An episode begins here, which is what "terminated" tells, though none has ended.
        yield self.vector_step(started, counters, terminated=np.ones(self.num_envs, bool))
        for request in requests:
            action = self.checked(context, request.nest_action, (self.num_envs,))
            outcome = env.step(action)
            counters.add(outcome)
            yield self.vector_step(outcome, counters, terminated=outcome.ended)

    def StreamingEnv(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """What learners of the original TorchBeast play: one game, and the server speaks first."""
        env, counters = Catch(1), Counters(1)
        observation = env.reset(seed=None)
        yield self.messages.Step(observation=self.codec.nest(observation[0]), done=True)
        for request in requests:
            # A number; some learners put dimensions of time and batch before it.
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
        """One message for all games.

        Catch has no time limit. An environment that has one says `truncated` instead of
        `terminated`, and adds `final_observation`: the last observations of the truncated games.
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
        """The action, or the end of the stream with the reason."""
        try:
            return self.codec.action(nest, *shapes)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise  # not reached: abort() raises


# ---- 4. The program -----------------------------------------------------------------------------


def serve(address: str, num_envs: int, num_streams: int, proto: Path) -> grpc.Server:
    """A running server. A stream keeps a thread for as long as it lasts; four are spare."""
    messages, services = generated_modules(proto)
    server = grpc.server(
        futures.ThreadPoolExecutor(num_streams + 4),
        options=[("grpc.max_receive_message_length", 256 << 20), ("grpc.so_reuseport", 0)],
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
    parser.add_argument("--num_streams", type=int, default=1, help="streams to be opened at once")
    parser.add_argument("--proto", type=Path, default=PROTO, help="where rpcenv.proto lies")
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
