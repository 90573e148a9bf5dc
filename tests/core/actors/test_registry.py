# SPDX-License-Identifier: Apache-2.0
"""Models by name, and what is refused at the door."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbeast.core.actors.networks import AtariNet, DeepNet, MLPNet, NormedAtariNet
from torchbeast.core.actors.registry import make_model
from torchbeast.core.envs.spaces import ArraySpec, Discrete

OBSERVATION, ACTIONS = ArraySpec((5,), "float32"), Discrete(3)

USER_MODULE = '''
import torch
from torch import nn
from torchbeast.core.actors.contract import ActorCritic, ModelOutput

class MyNet(ActorCritic):
    """Feed-forward; subclasses break one thing each."""
    logits, values = 3, 1

    def __init__(self, observation_space, action_space, use_lstm):
        super().__init__()
        self.spaces = (observation_space, action_space, use_lstm)
        self.policy = nn.Linear(5, self.logits)
        self.value = nn.Linear(5, self.values)

    def forward(self, inputs, core_state):
        x = inputs.observation
        baseline = self.value(x)
        baseline = baseline.squeeze(-1) if self.values == 1 else baseline
        return ModelOutput(self.policy(x), baseline, core_state)

class WrongLogits(MyNet):
    logits = 4

class WrongBaseline(MyNet):
    values = 2

class LosesState(MyNet):
    def initial_state(self, batch_size):
        return (torch.zeros(1, batch_size, 2),)

    def forward(self, inputs, core_state):
        return super().forward(inputs, ())

class StateWithoutBatch(MyNet):
    def initial_state(self, batch_size):
        return torch.zeros(2)

def NotAModel(*spaces):
    return "a string"
'''


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_nets_of_the_test.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "user_nets_of_the_test"


def test_built_in_names_give_their_nets() -> None:
    nets = {"deep": DeepNet, "shallow": AtariNet, "shallow-norm": NormedAtariNet, "mlp": MLPNet}
    for name, net in nets.items():
        assert type(make_model(name, OBSERVATION, ACTIONS, False)) is net


def test_use_lstm_gives_a_recurrent_state_and_its_absence_none() -> None:
    assert make_model("mlp", OBSERVATION, ACTIONS, False).initial_state(2) == ()
    hidden, cell = make_model("mlp", OBSERVATION, ACTIONS, True).initial_state(2)
    assert hidden.shape == cell.shape == (1, 2, 128)


def test_a_users_model_is_imported_and_told_the_spaces(user_module: str) -> None:
    model = make_model(f"{user_module}:MyNet", OBSERVATION, ACTIONS, True)
    assert model.spaces == (OBSERVATION, ACTIONS, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WrongLogits", r"policy_logits has shape \[2, 3, 4\].*expected \[2, 3, 3\]"),
        ("WrongBaseline", r"baseline has shape \[2, 3, 2\].*expected \[2, 3\]"),
        ("LosesState", r"recurrent state does not fit: Expected vectors of same length.* 1 vs 0"),
        ("StateWithoutBatch", r"recurrent state does not fit: \[2\] before, \[2\] after"),
        ("Missing", r"cannot import the model 'user_nets_of_the_test:Missing'"),
    ],
)
def test_a_users_model_that_breaks_the_contract_is_refused(
    user_module: str, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(f"{user_module}:{name}", OBSERVATION, ACTIONS, False)


def test_what_is_no_model_is_refused_with_its_type(user_module: str) -> None:
    with pytest.raises(TypeError, match="NotAModel is a str, not an actor: it must be a subclass"):
        make_model(f"{user_module}:NotAModel", OBSERVATION, ACTIONS, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "depe",
            "no model 'depe': use deep, shallow, shallow-norm, small, mlp, or my_module:MyNet",
        ),
        ("no_such_module_at_all:Net", "cannot import the model 'no_such_module_at_all:Net'"),
    ],
)
def test_an_unknown_name_is_named_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(name, OBSERVATION, ACTIONS, False)


def test_an_observation_without_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one array"):
        make_model("mlp", {}, ACTIONS, False)
