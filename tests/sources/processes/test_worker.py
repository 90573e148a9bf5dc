# SPDX-License-Identifier: Apache-2.0
"""A worker by itself: its weights, and its end in the middle of a rollout."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from background import Background
from compliance.source import Setup
from source_envs import Numbered
from torch import nn

from torchbeast.core.actors.registry import make_agent
from torchbeast.core.envs.vec_env import VecStep
from torchbeast.envs import EnvSpec
from torchbeast.sources.processes.shared_weights import SharedWeights
from torchbeast.sources.processes.weights_ring import address_of
from torchbeast.sources.processes.worker import (
    Ended,
    Failed,
    Played,
    ReceivedWeights,
    RolloutWorker,
    packed,
)

SETUP = Setup(env_id="source_envs:Numbered")


class Mixed(nn.Module):
    """Entries of every kind that a state_dict may have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.short = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.zeros(0, 4))


def test_every_dtype_and_shape_arrives() -> None:
    sent, replica, weights = Mixed(), Mixed(), ReceivedWeights()
    weights.receive(3, packed(sent))
    assert weights.refresh(replica, None) == 3
    for name, tensor in sent.state_dict().items():
        assert torch.equal(replica.state_dict()[name], tensor), name


def test_published_weights_are_a_copy() -> None:
    model, replica, weights = Mixed(), Mixed(), ReceivedWeights()
    before = model.weight.detach().clone()
    weights.receive(3, packed(model))
    with torch.no_grad():
        model.weight.zero_()
    weights.refresh(replica, None)
    assert torch.equal(replica.weight, before)


def test_parameters_act_where_they_are_and_buffers_may_be_written_to() -> None:
    sent, replica, weights = packed(Mixed()), Mixed(), ReceivedWeights()
    weights.receive(3, sent)
    weights.refresh(replica, None)
    assert replica.weight.data_ptr() == sent["weight"].ctypes.data
    replica.count += 1
    replica.mask.zero_()
    assert replica.count == 8 and sent["count"].view(np.int64) == [7] and sent["mask"].any()


def test_a_recurrent_layer_acts_with_the_newest_weights() -> None:
    """It keeps its parameters in a list too."""
    inputs, replica, weights = torch.randn(4, 2, 3), nn.LSTM(3, 5), ReceivedWeights()
    for version in (1, 2):
        sent = nn.LSTM(3, 5)
        weights.receive(version, packed(sent))
        weights.refresh(replica, version - 1)
        assert torch.equal(replica(inputs)[0], sent(inputs)[0])


def test_a_network_acts_with_the_newest_weights_by_any_name_that_it_has_for_them() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.weights = [self.layer.weight]

    replica, weights = Aliased(), ReceivedWeights()
    sent = Aliased()
    weights.receive(1, packed(sent))
    weights.refresh(replica, None)
    assert torch.equal(replica.weights[0], sent.layer.weight)


def test_embeddings_that_acting_renormalises_are_a_copy() -> None:
    replica, weights = nn.Sequential(nn.Embedding(4, 8, max_norm=0.5)), ReceivedWeights()
    sent = packed(nn.Sequential(nn.Embedding(4, 8)))
    before = sent["0.weight"].copy()
    weights.receive(1, sent)
    weights.refresh(replica, None)
    assert (replica(torch.arange(4)).norm(dim=1) < 0.51).all()
    np.testing.assert_array_equal(sent["0.weight"], before)


def test_a_buffer_with_two_names_is_a_copy() -> None:
    replica, weights = nn.Module(), ReceivedWeights()
    shared = torch.zeros(2)
    replica.register_buffer("first", shared)
    replica.register_buffer("second", shared)
    sent = packed(replica)
    weights.receive(1, sent)
    weights.refresh(replica, None)
    assert isinstance(replica.second, torch.Tensor)
    replica.second += 1
    assert not sent["second"].any()


def test_weights_that_are_held_are_not_loaded_again() -> None:
    replica, weights = Mixed(), ReceivedWeights()
    weights.receive(3, {})
    assert weights.refresh(replica, held=3) == 3
    weights.close()
    with pytest.raises(Ended):
        weights.refresh(replica, held=3)


class Held(Numbered):
    """Says that a step has begun, and waits until it may end."""

    began, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def step(self, action: Any) -> VecStep:
        self.began.set()
        self.may_end.wait(30)
        return super().step(action)

    def close(self) -> None:
        self.closed.set()


def arguments(env: str) -> dict[str, Any]:
    return {
        "env": EnvSpec(env).as_json(),
        "actor": SETUP.actor().as_json(),
        "precision": "float32",
        "unroll_length": 10**6,
        "extras": (),
        "mode": "sample",
        "num_envs": 2,
        "first_env": 0,
        "seed": 1,
        "ring": None,
    }


@pytest.fixture
def threads() -> Iterator[None]:
    """Workers set the number of torch's threads of their process."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def start(worker: RolloutWorker, env: str) -> Any:
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    return worker.start(arguments(env), 7, packed(agent.model))


def test_an_end_in_the_middle_of_a_rollout_closes_the_environments(threads: None) -> None:
    worker = RolloutWorker("actor 0")
    start(worker, f"{__name__}:Held")
    playing = Background(worker.play, 0)
    assert Held.began.wait(30)
    ending = Background(worker.end)
    assert worker.activity().stage == "environment" and not Held.closed.is_set()
    Held.may_end.set()
    assert playing.result() is None
    ending.result()
    assert Held.closed.is_set()


def test_what_an_environment_raises_is_a_result(threads: None) -> None:
    worker = RolloutWorker("actor 0")
    assert not isinstance(start(worker, "source_envs:Raises"), Failed)
    failed = worker.play(0)
    assert isinstance(failed, Failed) and "the joystick is gone" in failed.error
    assert not failed.usage and worker.activity().steps == 2 * 3


def test_one_that_cannot_be_made_is_a_mistake_of_the_user(threads: None) -> None:
    failed = start(RolloutWorker("actor 0"), "source_envs:NoSuchClass")
    assert isinstance(failed, Failed) and failed.usage and "NoSuchClass" in failed.error


def test_a_worker_that_reaches_the_learners_weights_acts_with_them(threads: None) -> None:
    """And with what it is sent where it does not."""
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    ring = SharedWeights(agent.model, version=7)
    worker = RolloutWorker("actor 0")
    for address, reads, version in [(address_of(ring, "node"), True, 9), (None, False, 5)]:
        given = {**arguments("source_envs:Numbered"), "unroll_length": 3, "ring": address}
        assert worker.start(given, 5, packed(agent.model)).reads_weights == reads
        ring.publish(agent.model, 9)
        played = worker.play(0)
        assert isinstance(played, Played)
        assert played.arrays["policy_version"][1:].tolist() == [[version, version]] * 3
        worker.end()


def test_weights_that_are_read_are_loaded_in_place_of_those_that_are_given() -> None:
    sent, given, replica, weights = Mixed(), Mixed(), Mixed(), ReceivedWeights()
    weights.receive(9, packed(given))
    weights.read_from(SharedWeights(sent, version=7))
    assert weights.version == 7 == weights.refresh(replica, None)
    assert torch.equal(replica.weight, sent.weight)
    assert not torch.equal(replica.weight, given.weight)


def test_weights_that_are_not_needed_any_more_are_let_go(threads: None) -> None:
    """They are in the object store, which would keep a version for every worker."""
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    ring = SharedWeights(agent.model, version=7)
    address, worker = address_of(ring, "node"), RolloutWorker("actor 0")
    sent = packed(agent.model)
    arrays = [weakref.ref(array) for array in sent.values()]
    worker.start({**arguments("source_envs:Numbered"), "ring": address}, 7, sent)
    del sent
    assert [array() for array in arrays] == [None] * len(arrays)
    worker.end()


def test_an_end_is_noticed_while_weights_are_read(threads: None) -> None:
    model = Mixed()
    weights = ReceivedWeights()
    weights.read_from(SharedWeights(model, version=7))
    weights.close()
    with pytest.raises(Ended):
        weights.refresh(model, held=7)


def test_a_worker_may_be_started_again(threads: None) -> None:
    worker = RolloutWorker("actor 0")
    start(worker, "source_envs:Raises")
    worker.end()
    start(worker, "source_envs:Numbered")
    worker._arguments = {**worker._arguments, "unroll_length": 3}
    played = worker.play(0)
    assert isinstance(played, Played) and played.activity.steps == 2 * 3
    assert played.arrays["policy_version"][1:4].tolist() == [[7, 7]] * 3
