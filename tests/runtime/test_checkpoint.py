# SPDX-License-Identifier: Apache-2.0
"""Checkpoints load without trusting them, and a wrong one is a sentence."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from torchbeast.core.algos.impala import Impala, ImpalaConfig
from torchbeast.core.distributions import distribution_for
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.runtime import checkpoint as checkpoints
from torchbeast.runtime.agent import Agent, make_agent
from torchbeast.runtime.errors import UsageError


def agent(size: int = 4, use_lstm: bool = False) -> Agent:
    return make_agent("mlp", ArraySpec((size,), "float32"), Discrete(3), 1, use_lstm)


def impala(model: torch.nn.Module) -> Impala:
    return Impala(model, distribution_for(Discrete(3)), ImpalaConfig())


def checkpoint_of(algo: Impala) -> dict:
    return {**algo.state_dict(), "stats": {"step": 7}, "flags": {}, "rng": checkpoints.rng_state()}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    algo = impala(agent().model)
    checkpoints.save(tmp_path / "model.tar", checkpoint_of(algo))
    saved = checkpoints.load(tmp_path / "model.tar")
    other = impala(agent().model)
    checkpoints.resume(other, saved, tmp_path / "model.tar")
    ours, theirs = algo.model.state_dict(), other.model.state_dict()
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert saved["stats"] == {"step": 7}


def test_the_generator_continues_where_it_was(tmp_path: Path) -> None:
    algo = impala(agent().model)
    checkpoints.save(tmp_path / "model.tar", checkpoint_of(algo))
    expected = torch.rand(5)
    checkpoints.resume(algo, checkpoints.load(tmp_path / "model.tar"), tmp_path / "model.tar")
    assert torch.equal(torch.rand(5), expected)


def test_it_loads_with_weights_only(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "model.tar", checkpoint_of(impala(agent().model)))
    saved = torch.load(tmp_path / "model.tar", weights_only=True)
    assert set(checkpoints.KEYS) <= set(saved)


class Evil:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("/tmp/torchbeast-test-must-not-exist"),))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.tar").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match="no readable checkpoint"):
        checkpoints.load(tmp_path / "model.tar")
    assert not Path("/tmp/torchbeast-test-must-not-exist").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", b"PK\x03\x04torn"])
def test_a_torn_file_is_a_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.tar").write_bytes(data)
    with pytest.raises(UsageError, match="no readable checkpoint") as error:
        checkpoints.load(tmp_path / "model.tar")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no checkpoint at"):
        checkpoints.load(tmp_path / "model.tar")


def test_a_file_that_lacks_a_key_is_a_sentence(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "model.tar", {"model_state_dict": {}})
    with pytest.raises(UsageError, match="it lacks optimizer_state_dict"):
        checkpoints.load(tmp_path / "model.tar")


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
