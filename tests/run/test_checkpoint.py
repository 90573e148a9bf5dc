# SPDX-License-Identifier: Apache-2.0
"""Checkpoints load without running their code, and a wrong one is refused with a message."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import impala

from torchbeast.core.actors.contract import Agent, ModelInputs
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.errors import UsageError
from torchbeast.run import checkpoint as checkpoints


def agent(size: int = 4, use_lstm: bool = False) -> Agent:
    return make_agent(
        ActorSpec("mlp", use_lstm=use_lstm), ArraySpec((size,), "float32"), Discrete(3), 1
    )


def checkpoint_of(step: OptimiserStep[Any]) -> dict:
    return {**step.state_dict(), "stats": {"step": 7}, "flags": {}, "rng": checkpoints.rng_state()}


def test_a_loaded_checkpoint_equals_what_was_saved(tmp_path: Path) -> None:
    step = impala(agent().model)
    checkpoints.save(tmp_path / "model.tar", checkpoint_of(step))
    saved = checkpoints.load(tmp_path / "model.tar")
    other = impala(agent().model)
    checkpoints.resume(other, saved, tmp_path / "model.tar")
    ours, theirs = step.algo.actor.state_dict(), other.algo.actor.state_dict()
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert saved["stats"] == {"step": 7}


def test_the_random_generator_continues_where_it_was_saved(tmp_path: Path) -> None:
    step = impala(agent().model)
    checkpoints.save(tmp_path / "model.tar", checkpoint_of(step))
    expected = torch.rand(5)
    checkpoints.resume(step, checkpoints.load(tmp_path / "model.tar"), tmp_path / "model.tar")
    assert torch.equal(torch.rand(5), expected)


def test_a_checkpoint_loads_with_weights_only(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "model.tar", checkpoint_of(impala(agent().model)))
    saved = torch.load(tmp_path / "model.tar", weights_only=True)
    assert set(checkpoints.KEYS) <= set(saved)


class Evil:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("/tmp/torchbeast-test-must-not-exist"),))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.tar").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match="not a valid checkpoint"):
        checkpoints.load(tmp_path / "model.tar")
    assert not Path("/tmp/torchbeast-test-must-not-exist").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", b"root:x:0:0:root", b"PK\x03\x04torn"])
def test_a_torn_file_is_refused_with_a_message(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.tar").write_bytes(data)
    with pytest.raises(UsageError, match="not a valid checkpoint") as error:
        checkpoints.load(tmp_path / "model.tar")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no checkpoint at /.*use the folder of a run"):
        checkpoints.load(tmp_path / "model.tar")


def test_a_file_that_lacks_a_key_is_refused_with_a_message(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "model.tar", {"model_state_dict": {}})
    with pytest.raises(UsageError, match="it lacks optimizer_state_dict"):
        checkpoints.load(tmp_path / "model.tar")


def test_a_file_of_a_newer_format_is_refused_with_a_message(tmp_path: Path) -> None:
    saved = checkpoint_of(impala(agent().model)) | {"format": 2}
    checkpoints.save(tmp_path / "model.tar", saved)
    with pytest.raises(UsageError, match="has format 2, but this TorchBeast reads formats up to 1"):
        checkpoints.load(tmp_path / "model.tar")


@pytest.mark.parametrize("odd", ["auto", 5, None])
def test_an_unknown_form_of_rewards_is_refused_with_a_message(odd: Any) -> None:
    saved = {"model_state_dict": {}, "flags": {}, "reward_input": odd}
    with pytest.raises(UsageError, match=f"reward_input {odd!r}, but .* supports abs_one, none"):
        checkpoints.actor_spec(saved)


ATARI, BOARD, VECTOR = (4, 84, 84), (10, 10, 4), (8,)


@pytest.mark.parametrize(
    ("model", "recorded", "expected"),
    [
        ("shallow", {"model": "shallow-norm"}, "shallow-norm"),
        ("shallow", {"model": "shallow"}, "shallow-norm"),  # it standardised its images then
        ("deep", {"model": "deep"}, "deep"),
        ("deep", {"model": "my_nets:MyNet"}, "my_nets:MyNet"),
        ("shallow", {}, "shallow"),  # the original MonoBeast
        ("deep", {}, "deep"),  # the original PolyBeast
        ("deep", {"model": "auto"}, "deep"),
        ("small", {"model": "auto"}, "small"),
        ("mlp", {"model": "auto"}, "mlp"),
    ],
)
@pytest.mark.parametrize("leaves", ["one leaf", "two leaves"])
def test_the_network_of_a_file_without_a_format_is_found(
    model: str, recorded: dict[str, str], expected: str, leaves: str
) -> None:
    image = ArraySpec({"small": BOARD, "mlp": VECTOR}.get(model, ATARI), "uint8")
    seen = image if leaves == "one leaf" else {"a": ArraySpec((3,), "float32"), "b": image}
    weights = make_agent(ActorSpec(model), seen, Discrete(3), 1).model.state_dict()
    saved = {"model_state_dict": weights, "flags": recorded}
    assert checkpoints.model_name(saved) == expected


def test_the_network_of_a_file_without_a_format_gets_vectors_unchanged() -> None:
    """Compares with the names, shapes and formula of MLPNet before there was a format."""
    seen = ArraySpec((4,), "float32", low=-math.inf, high=math.inf)
    sizes = {"linear": (128, 4), "fc": (128, 128), "policy": (2, 131), "baseline": (1, 131)}
    weights = {f"{name}.weight": torch.randn(size) / 10 for name, size in sizes.items()}
    weights |= {f"{name}.bias": torch.randn(size[0]) for name, size in sizes.items()}
    reads_values = checkpoints.reads_values({"flags": {"model": "mlp"}})
    model = make_agent(ActorSpec("mlp", reads_values=reads_values), seen, Discrete(2), 1).model
    model.load_state_dict(weights)
    frame, last_action = torch.tensor([[[0.1, -300.0, 2.0, 7.0]]]), torch.tensor([[1]])
    inputs = ModelInputs(frame, torch.tensor([[0.5]]), torch.tensor([[False]]), last_action)
    features = frame
    for name in ("linear", "fc"):
        features = (features @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).relu()
    features = torch.cat([features, torch.tensor([[[0.5, 0.0, 1.0]]])], -1)
    logits = features @ weights["policy.weight"].T + weights["policy.bias"]
    torch.testing.assert_close(model(inputs, ()).policy_logits, logits)


def test_a_network_made_without_value_ranges_is_recorded_as_such() -> None:
    """Servers may not describe ranges that the environment itself has in an evaluation."""
    told = ArraySpec((4,), "float32", low=-math.inf, high=math.inf)
    trained = agent()
    assert not trained.spec.reads_values
    saved = {"format": 1, "reads_values": trained.spec.reads_values}
    played = make_agent(
        ActorSpec("mlp", reads_values=checkpoints.reads_values(saved)), told, Discrete(3), 1
    )
    played.model.load_state_dict(trained.model.state_dict())
    assert make_agent(ActorSpec("mlp"), told, Discrete(3), 1).spec.reads_values


@pytest.mark.parametrize("shape", [(2,), (10, 10, 4)])
def test_a_network_of_a_file_without_the_entry_keeps_floats_up_to_100_unscaled(
    shape: tuple[int, ...],
) -> None:
    """It has no statistics, and a run that continues it writes down that it has none."""
    seen = {"a": ArraySpec(shape, "float32", 0.0, 100.0), "b": ArraySpec((2,), "float32", 0, 101)}
    made = make_agent(ActorSpec("auto"), seen, Discrete(3), 1)
    saved = {**checkpoints.labels(made, {}), "model_state_dict": {}}
    del saved["unscaled_to_100"]
    older = make_agent(checkpoints.actor_spec(saved), seen, Discrete(3), 1)
    again = {**checkpoints.labels(older, {}), "model_state_dict": {}}
    continued = make_agent(checkpoints.actor_spec(again), seen, Discrete(3), 1)
    counts = [sum("count" in name for name in each.model.state_dict()) for each in (made, older)]
    assert counts == [2, 1] and older.spec.name == made.spec.name
    continued.model.load_state_dict(older.model.state_dict())


def test_a_file_with_a_format_names_its_network() -> None:
    saved = {"format": 1, "model": "shallow", "flags": {"model": "auto"}, "model_state_dict": {}}
    assert checkpoints.model_name(saved) == "shallow"


@pytest.mark.parametrize("other", [{"size": 5}, {"use_lstm": True}], ids=["shape", "names"])
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    tmp_path: Path, other: dict
) -> None:
    checkpoints.save(tmp_path / "model.tar", checkpoint_of(impala(agent(**other).model)))
    saved = checkpoints.load(tmp_path / "model.tar")
    model = agent().model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match="another model"):
        checkpoints.load_model(model, saved, tmp_path / "model.tar")
    with pytest.raises(UsageError, match="another model"):
        checkpoints.resume(impala(model), saved, tmp_path / "model.tar")
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
