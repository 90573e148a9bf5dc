# SPDX-License-Identifier: Apache-2.0
"""A worker by itself: its weights, and its end in the middle of a rollout."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from background import Background
from compliance.source import Setup
from source_envs import Numbered
from torch import nn

from torchbeast.collect.rollout_buffers import SharedRollouts
from torchbeast.collect.weights import SentWeights, SharedWeights, address_of, packed
from torchbeast.collect.worker import PlayedRollout, RolloutWorker, Started
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.envs import EnvSpec
from torchbeast.errors import RunError, UsageError

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
    sent, replica, weights = Mixed(), Mixed(), SentWeights()
    weights.receive(3, packed(sent))
    assert weights.refresh(replica, None) == 3
    for name, tensor in sent.state_dict().items():
        assert torch.equal(replica.state_dict()[name], tensor), name


def test_published_weights_are_a_copy() -> None:
    model, replica, weights = Mixed(), Mixed(), SentWeights()
    before = model.weight.detach().clone()
    weights.receive(3, packed(model))
    with torch.no_grad():
        model.weight.zero_()
    weights.refresh(replica, None)
    assert torch.equal(replica.weight, before)


def test_what_acting_writes_to_stays_in_the_worker() -> None:
    sent, replica, weights = packed(Mixed()), Mixed(), SentWeights()
    before = sent.copy()
    weights.receive(3, sent)
    weights.refresh(replica, None)
    with torch.no_grad():
        replica.weight.zero_()
    replica.count += 1
    replica.mask.zero_()
    np.testing.assert_array_equal(sent, before)


def test_a_recurrent_layer_acts_with_the_newest_weights() -> None:
    """It keeps its parameters in a list too."""
    inputs, replica, weights = torch.randn(4, 2, 3), nn.LSTM(3, 5), SentWeights()
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

    replica, weights = Aliased(), SentWeights()
    sent = Aliased()
    weights.receive(1, packed(sent))
    weights.refresh(replica, None)
    assert torch.equal(replica.weights[0], sent.layer.weight)


def test_weights_that_are_held_are_not_loaded_again_and_others_are_not_taken_for_them() -> None:
    replica, weights = Mixed(), SentWeights()
    weights.receive(3, np.empty(0))
    assert weights.refresh(replica, held=3, wanted=3) == 3
    with pytest.raises(LookupError, match="version 4 is not the newest one, 3"):
        weights.refresh(replica, held=3, wanted=4)


class Held(Numbered):
    """Says that a step has begun, and waits until it may end."""

    began, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def step(self, action: Any) -> VecStep:
        self.began.set()
        self.may_end.wait(30)
        return super().step(action)

    def close(self) -> None:
        self.closed.set()


class Unready(Numbered):
    """Cannot be reset."""

    closed = threading.Event()

    def reset(self, seed: int) -> Any:
        raise RuntimeError("the simulator does not answer")

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
        "slots": None,
        "num_slots": 2,
    }


@pytest.fixture
def threads() -> Iterator[None]:
    """Workers set the number of torch's threads of their process."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def start(worker: RolloutWorker, env: str, **others: Any) -> Any:
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    return worker.start({**arguments(env), **others}, (7, packed(agent.model)))


def play(worker: RolloutWorker, rollout: int = 0) -> Any:
    return worker.play(0, rollout, None, None)


def test_an_end_in_the_middle_of_a_rollout_ends_it_and_all_later_ones(threads: None) -> None:
    worker = RolloutWorker("worker 0")
    start(worker, f"{__name__}:Held")
    playing = Background(play, worker)
    assert Held.began.wait(30)
    worker.end()
    assert worker.activity().stage == "environment" and not playing.ended
    Held.may_end.set()
    assert playing.result() is None and play(worker, 1) is None
    assert not Held.closed.is_set()
    worker.close()
    assert Held.closed.is_set()


def test_what_an_environment_raises_is_a_result(threads: None) -> None:
    worker = RolloutWorker("worker 0")
    assert not isinstance(start(worker, "source_envs:Raises"), Exception)
    failed = play(worker)
    assert isinstance(failed, RunError) and "the joystick is gone" in str(failed)
    assert worker.activity().steps == 2 * 3


def test_environments_are_closed_if_their_first_reset_fails(threads: None) -> None:
    assert isinstance(start(RolloutWorker("worker 0"), f"{__name__}:Unready"), RunError)
    assert Unready.closed.is_set()


def test_one_that_cannot_be_made_is_a_mistake_of_the_user(threads: None) -> None:
    failed = start(RolloutWorker("worker 0"), "source_envs:NoSuchClass")
    assert isinstance(failed, UsageError) and "NoSuchClass" in str(failed)


def near(ring: SharedWeights, node: str = "") -> dict[str, Any]:
    address = address_of(ring, "elsewhere", is_inherited=True)
    assert address is not None
    short = {**arguments("source_envs:Numbered"), "unroll_length": 3}
    return {**short, "ring": address._replace(node=node)}


def test_a_worker_that_reaches_the_learners_weights_acts_with_them(threads: None) -> None:
    """And with what it is sent where it does not."""
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    ring = SharedWeights(agent.model, version=7)
    worker = RolloutWorker("worker 0")
    for node, reads, version in [("", True, 9), ("another node", False, 5)]:
        started = worker.start(near(ring, node), (5, packed(agent.model)))
        assert isinstance(started, Started) and started.reads_weights == reads
        ring.publish(agent.model, 9)
        played = play(worker)
        assert isinstance(played, PlayedRollout)
        assert played.arrays["policy_version"][1:].tolist() == [[version, version]] * 3
        worker.close()


def test_weights_that_are_sent_with_a_rollout_act_in_it(threads: None) -> None:
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    worker, sent = RolloutWorker("worker 0"), packed(agent.model)
    worker.start({**arguments("source_envs:Numbered"), "unroll_length": 3}, (5, sent))
    played = worker.play(0, 0, 6, (6, sent))
    assert isinstance(played, PlayedRollout) and (played.arrays["policy_version"][1:] == 6).all()
    assert isinstance(worker.play(0, 1, 8, None), RunError), "it was not sent 8"
    worker.close()


def test_weights_that_are_not_needed_are_not_even_fetched(threads: None) -> None:
    """They are in the object store, which would keep a version for every worker."""
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    worker = RolloutWorker("worker 0")
    ring = SharedWeights(agent.model, version=7)
    worker.start(near(ring), (7, "a reference"))
    assert worker._sent.version == 0
    worker.close()


def test_a_rollout_is_written_into_a_slot_that_is_shared(threads: None) -> None:
    agent = make_agent(SETUP.actor(), *SETUP.spaces())
    ours = SharedRollouts(RolloutSpec(agent, (), 3), num_envs=2, num_slots=2)
    worker = RolloutWorker("worker 0")
    ring = SharedWeights(agent.model, version=7)
    worker.start({**near(ring), "slots": ours.descriptor}, None)
    for slot in (1, 0):
        played = worker.play(slot, 4 + slot, None, None)
        assert isinstance(played, PlayedRollout) and played.arrays is None
    assert [slot["rollout_index"].flatten().tolist() for slot in ours.slots] == [[4] * 8, [5] * 8]
    worker.close()


def test_a_worker_may_be_started_again(threads: None) -> None:
    worker = RolloutWorker("worker 0")
    start(worker, "source_envs:Raises")
    worker.end()
    worker.close()
    start(worker, "source_envs:Numbered", unroll_length=3)
    played = play(worker)
    assert isinstance(played, PlayedRollout) and played.activity.steps == 2 * 3
    assert played.arrays["policy_version"][1:4].tolist() == [[7, 7]] * 3
    worker.close()
