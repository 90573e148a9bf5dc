# SPDX-License-Identifier: Apache-2.0
"""Checkpoints load without running their code, and a wrong one is refused with a message."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import impala

from torchbeast.core.actors.contract import Agent
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
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.tar").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(UsageError, match="not a valid checkpoint"):
        checkpoints.load(tmp_path / "model.tar")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", b"root:x:0:0:root", b"PK\x03\x04torn"])
def test_a_torn_file_is_refused_with_a_message(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.tar").write_bytes(data)
    with pytest.raises(UsageError, match="not a valid checkpoint") as error:
        checkpoints.load(tmp_path / "model.tar")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no checkpoint at .*: there are no runs in {tmp_path}$"):
        checkpoints.load(tmp_path / "none" / "model.tar")
    for number in range(7):
        (tmp_path / f"run-{number}").mkdir()
        (meta := tmp_path / f"run-{number}" / "meta.json").touch()
        os.utime(meta, (number, number))
    newest = ", ".join(f"run-{number}" for number in (6, 5, 4, 3, 2))
    with pytest.raises(UsageError, match=f": the newest runs in {tmp_path} are {newest}$"):
        checkpoints.load(tmp_path / "none")
    run = tmp_path / "run-6"
    with pytest.raises(UsageError, match=f"/model.tar: there are none in {run}$"):
        checkpoints.load(run / "model.tar")
    (run / "model.1.tar").touch()
    with pytest.raises(UsageError, match=f": the checkpoints in {run} are model.1.tar$"):
        checkpoints.load(run / "model.tar")


def test_a_file_that_lacks_a_key_is_refused_with_a_message(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "model.tar", {"model_state_dict": {}})
    with pytest.raises(UsageError, match="it lacks optimizer_state_dict"):
        checkpoints.load(tmp_path / "model.tar")


def test_a_file_of_a_newer_format_is_refused_with_a_message(tmp_path: Path) -> None:
    saved = checkpoint_of(impala(agent().model)) | {"format": 2}
    for contents in (saved, {"format": 2}):  # whose other keys may have other names
        checkpoints.save(tmp_path / "model.tar", contents)
        with pytest.raises(UsageError, match="has format 2, but this TorchBeast reads .* up to 1"):
            checkpoints.load(tmp_path / "model.tar")


@pytest.mark.parametrize("model", ["shallow", "deep"])
def test_the_network_of_a_file_of_torchbeast_2019_is_found_by_its_weights(model: str) -> None:
    image = ArraySpec((4, 84, 84), "uint8")
    weights = make_agent(ActorSpec(model), image, Discrete(3), 1).model.state_dict()
    spec = checkpoints.actor_spec({"model_state_dict": weights, "flags": {}})
    assert spec == ActorSpec(model, reward_input="abs_one", reads_values=False)


def test_a_network_made_without_value_ranges_is_recorded_as_such() -> None:
    """Servers may not describe ranges that the environment itself has in an evaluation."""
    told = ArraySpec((4,), "float32", low=-math.inf, high=math.inf)
    trained = agent()
    assert not trained.spec.reads_values
    weights, recorded = trained.model.state_dict(), checkpoints.labels(trained, {})
    spec = checkpoints.actor_spec({**recorded, "model_state_dict": weights})
    played = make_agent(spec, told, Discrete(3), 1)
    played.model.load_state_dict(weights)
    assert make_agent(ActorSpec("mlp"), told, Discrete(3), 1).spec.reads_values


def test_a_file_with_a_format_names_its_network() -> None:
    saved = {"format": 1, "model": "shallow", "flags": {"model": "auto"}, "model_state_dict": {}}
    assert checkpoints.actor_spec(saved).name == "shallow"


def test_layers_in_another_order_are_refused(tmp_path: Path) -> None:
    """The state of the optimiser has numbers in place of names."""
    saved = checkpoint_of(impala(agent().model))
    saved["model_state_dict"] = dict(reversed(saved["model_state_dict"].items()))
    with pytest.raises(UsageError, match="have another order"):
        checkpoints.resume(impala(agent().model), saved, tmp_path / "model.tar")


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
