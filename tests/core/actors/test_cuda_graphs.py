# SPDX-License-Identifier: Apache-2.0
"""A replica that replays CUDA graphs acts as one that does not; most tests need a GPU."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchbeast.core.actors.contract import ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.cuda_graphs import use_cuda_graphs
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete

on_a_gpu = pytest.mark.skipif("not torch.cuda.is_available()", reason="PyTorch finds no GPU")
NETS = [("mlp", (5,), False), ("mlp", (5,), True), ("shallow", (4, 84, 84), True)]


def actor_of(name: str, shape: tuple[int, ...], use_lstm: bool, device: str = "cuda") -> Any:
    spec = ArraySpec(shape, "float32" if len(shape) == 1 else "uint8")
    agent = make_agent(ActorSpec(name=name, use_lstm=use_lstm), spec, Discrete(3), 1)
    return agent.model.to(device)


def row(actor: Any, shape: tuple[int, ...], num_envs: int) -> tuple[ModelInputs, Any]:
    """Returns random inputs of one row, on the actor's device."""
    device = next(actor.parameters()).device
    inputs = ModelInputs(
        torch.randint(0, 9, (1, num_envs, *shape), device=device).to(torch.uint8)
        if len(shape) > 1
        else torch.randn(1, num_envs, *shape, device=device),
        torch.randn(1, num_envs, device=device),
        torch.rand(1, num_envs, device=device) < 0.3,
        torch.randint(0, 3, (1, num_envs), device=device),
    )
    state = map_leaves(torch.randn_like, actor.initial_state(num_envs))
    return inputs, state


def assert_close(found: Any, expected: Any) -> None:
    """Compares up to TF32: a padded batch may be computed by another kernel."""
    for one, other in zip(flatten(tuple(found)), flatten(tuple(expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@on_a_gpu
@pytest.mark.parametrize(("name", "shape", "use_lstm"), NETS)
def test_batches_of_all_sizes_have_the_outputs_of_the_network(
    name: str, shape: tuple[int, ...], use_lstm: bool
) -> None:
    actor = actor_of(name, shape, use_lstm)
    replica = copy.deepcopy(actor)
    use_cuda_graphs([replica], num_envs=6)
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for num_envs in (3, 1, 6, 8, 4, 9, 5):  # 9 is larger than the largest graph
            inputs = row(actor, shape, num_envs)
            assert_close(replica(*inputs), actor(*inputs))


@on_a_gpu
def test_weights_that_are_loaded_later_are_used() -> None:
    replica, other = actor_of("mlp", (5,), False), actor_of("mlp", (5,), False)
    use_cuda_graphs([replica], num_envs=4)
    inputs = row(other, (5,), 4)
    with torch.inference_mode():
        before = replica(*inputs).policy_logits.clone()
        replica.load_state_dict(other.state_dict())
        after = replica(*inputs).policy_logits.clone()
        assert not after.allclose(before) and after.allclose(other(*inputs).policy_logits)


@on_a_gpu
def test_replicas_in_several_threads_do_not_disturb_each_other() -> None:
    actor, shape = actor_of("shallow", (4, 84, 84), True), (4, 84, 84)
    replicas = [copy.deepcopy(actor) for _ in range(3)]
    use_cuda_graphs(replicas, num_envs=16)
    failures: list[BaseException] = []

    def play(replica: Any, seed: int) -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                for count in range(40):
                    inputs, state = row(actor, shape, 1 + (count * seed) % 16)
                    acted = replica.act(inputs, state, "greedy")
                    with torch.inference_mode():
                        expected = actor(inputs, state)
                    assert_close(acted.extras["policy_logits"][None], expected.policy_logits[None])
                    stream.synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=play, args=(r, 3 + i)) for i, r in enumerate(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class OnHost(ActorCritic):
    """Reads a result on the host, which cannot be recorded."""

    separable = True

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(5, 3)

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        logits = self.policy(inputs.observation)
        if float(logits.sum()) > 1e9:
            raise AssertionError
        return ModelOutput(logits, logits[..., 0], core_state)


@on_a_gpu
@pytest.mark.parametrize("recordable", [True, False])
def test_a_network_that_reads_its_results_is_refused_unless_it_says_so(recordable: bool) -> None:
    """In a process of its own, because torch's random numbers cannot be used afterwards."""
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_cuda_graphs import OnHost, row, torch, use_cuda_graphs
OnHost.recordable = {recordable}
replica = OnHost().cuda()
use_cuda_graphs([replica], num_envs=4)
with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
    replica(*row(replica, (5,), 2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert ("set its class attribute recordable to False" in done.stderr) == recordable
    assert (done.returncode == 0) == (not recordable)


def test_actors_on_the_cpu_keep_their_forward() -> None:
    actor = actor_of("mlp", (5,), True, device="cpu")
    use_cuda_graphs([actor], num_envs=4)
    assert "forward" not in vars(actor)
