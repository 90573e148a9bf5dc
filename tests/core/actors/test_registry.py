# SPDX-License-Identifier: Apache-2.0
"""Models by name, and what is refused at the door."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from torchbeast.core.actors import off_policy
from torchbeast.core.actors.networks import AtariNet, DeepNet, MLPNet, NormedAtariNet
from torchbeast.core.actors.registry import (
    ACTOR_CRITICS,
    OFF_POLICY,
    describe_agent,
    make_agent,
    make_model,
)
from torchbeast.core.base.specs import ActorSpec, SpecError
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.errors import RunError

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

class Tabled(MyNet):
    table = None

    def forward(self, inputs, state):
        if self.table is None:
            self.table = torch.linspace(1.0, 2.0, 100)
        output = super().forward(inputs, state)
        return output._replace(baseline=output.baseline * self.table[: len(output.baseline), None])

class Wide(MyNet):
    def __init__(self, observation_space, action_space, use_lstm, width, *, depth=1):
        super().__init__(observation_space, action_space, use_lstm)
        self.size = width, depth

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
        assert type(make_model(ActorSpec(name), OBSERVATION, ACTIONS)) is net


def test_use_lstm_gives_a_recurrent_state_and_its_absence_none() -> None:
    assert make_model(ActorSpec("mlp"), OBSERVATION, ACTIONS).initial_state(2) == ()
    hidden, cell = make_model(ActorSpec("mlp", use_lstm=True), OBSERVATION, ACTIONS).initial_state(
        2
    )
    assert hidden.shape == cell.shape == (1, 2, 128)


def test_a_users_model_is_imported_and_told_the_spaces(user_module: str) -> None:
    model = make_model(ActorSpec(f"{user_module}:MyNet", use_lstm=True), OBSERVATION, ACTIONS)
    assert model.spaces == (OBSERVATION, ACTIONS, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WrongLogits", r"policy_logits does not fit: .*\[2, 3, 4\].*expected .*\[2, 3, 3\]"),
        ("WrongBaseline", r"baseline does not fit: .*\[2, 3, 2\].*expected .*\[2, 3\]"),
        ("LosesState", r"recurrent state does not fit: nests don't match: .* 0 vs .* 1"),
        (
            "StateWithoutBatch",
            r"recurrent state does not fit: \[2\] for 3 .*expected \[layers, 3, ",
        ),
        ("Missing", r"the module user_nets_of_the_test has no 'Missing'"),
    ],
)
def test_a_users_model_that_breaks_the_contract_is_refused(
    user_module: str, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(ActorSpec(f"{user_module}:{name}"), OBSERVATION, ACTIONS)


def test_a_model_may_keep_a_table_of_its_first_forward_pass(user_module: str) -> None:
    """It could not be trained with a table that is an inference tensor."""
    model = make_model(ActorSpec(f"{user_module}:Tabled"), OBSERVATION, ACTIONS)
    assert not model.table.is_inference()


def test_keyword_arguments_reach_a_users_model(user_module: str) -> None:
    spec = ActorSpec(f"{user_module}:Wide", {"width": 7, "depth": 3}, use_lstm=True)
    model = make_model(spec, OBSERVATION, ACTIONS)
    assert model.size == (7, 3) and model.spaces == (OBSERVATION, ACTIONS, True)


def test_the_names_of_off_policy_networks_are_known_before_they_are_imported() -> None:
    assert set(OFF_POLICY) == {*off_policy.NETWORKS}


@pytest.mark.parametrize("name", ACTOR_CRITICS)
@pytest.mark.parametrize("use_lstm", [False, True])
def test_hidden_is_the_width_of_every_built_in_network(name: str, use_lstm: bool) -> None:
    spec = ActorSpec(name, {"hidden": 24}, use_lstm=use_lstm)
    model = make_model(spec, ArraySpec((4, 40, 40), "uint8"), ACTIONS)
    assert model.fc.out_features == 24
    if use_lstm:
        follows_its_input = name.startswith("shallow")
        assert model.core.hidden_size == (24 + 1 + 3 if follows_its_input else 24)


OPTIONS = (
    "'hidden', 'core', 'core_layers', 'core_length', 'norm', 'shared_body', 'orthogonal', "
    "'state_deviation', 'initial_deviation', 'activation'"
)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"activation": "elu"}, 'activation must be relu or tanh, got "elu"$'),
        ({"initial_deviation": 0}, "initial_deviation must be a number above 0, got 0$"),
        ({"initial_deviation": "1"}, 'initial_deviation must be a number above 0, got "1"$'),
        ({"size": 8}, f"^model mlp: .*'size'; it takes {OPTIONS}, got size=8$"),
        ({"use_lstm": True}, f"^model mlp: .*'use_lstm'; it takes {OPTIONS}, got use_lstm=true$"),
    ],
)
def test_keyword_arguments_that_a_model_does_not_take_are_refused(
    kwargs: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_model(ActorSpec("mlp", kwargs), OBSERVATION, ACTIONS)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        *[("mlp", hidden) for hidden in (-3, 1.5, 64.0, "64", True, [64])],
        *[(name, 0) for name in ACTOR_CRITICS],
    ],
)
def test_a_width_that_no_layer_can_have_is_refused_by_its_name(name: str, hidden: object) -> None:
    """The environment is not to blame, so that the sentence is left as it is."""
    spec = ActorSpec(name, {"hidden": hidden})
    with pytest.raises(SpecError) as error:
        make_agent(spec, ArraySpec((4, 40, 40), "uint8"), ACTIONS, frame_stack=1)
    assert str(error.value) == (
        "the model's keyword argument hidden must be a whole number, at least 1, got "
        f"{json.dumps(hidden)}"
    )


def test_arguments_of_a_model_that_fails_are_named() -> None:
    spec = ActorSpec("mlp", {"hidden": 10**15})  # more than any machine can address
    with pytest.raises(
        ValueError, match="^the model mlp with hidden=1000000000000000 cannot be made"
    ):
        make_agent(spec, OBSERVATION, ACTIONS, frame_stack=1)


def test_keyword_arguments_that_a_users_model_needs_are_named(user_module: str) -> None:
    with pytest.raises(ValueError, match="Wide: missing .*'width'; .* got depth=2$"):
        make_model(ActorSpec(f"{user_module}:Wide", {"depth": 2}), OBSERVATION, ACTIONS)


def test_a_model_is_given_rewards_in_the_form_of_its_spec() -> None:
    assert make_model(ActorSpec("mlp"), OBSERVATION, ACTIONS).reward_input == "abs_one"
    spec = ActorSpec("mlp", reward_input="none")
    assert make_model(spec, OBSERVATION, ACTIONS).reward_input == "none"


def test_what_is_no_model_is_refused_with_its_type(user_module: str) -> None:
    with pytest.raises(
        SpecError, match="NotAModel made a str, which cannot act: make it a subclass"
    ):
        make_model(ActorSpec(f"{user_module}:NotAModel"), OBSERVATION, ACTIONS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "depe",
            "no model 'depe': use deep, fixup, shallow, shallow-norm, small, mlp, or "
            "my_module:MyNet; did you mean deep",
        ),
        ("no_such_module_at_all:Net", "there is no module no_such_module_at_all"),
    ],
)
def test_an_unknown_name_is_named_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(ActorSpec(name), OBSERVATION, ACTIONS)


def test_an_error_of_a_network_in_an_installed_package_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site-packages" / "installed_nets.py"
    file.parent.mkdir()
    file.write_text("def make(observation_space, action_space, use_lstm):\n    int('12 px')\n")
    monkeypatch.syspath_prepend(file.parent)
    with pytest.raises(RunError, match="^the model installed_nets:make failed: Traceback") as error:
        make_agent(ActorSpec("installed_nets:make"), ArraySpec((8,), "float32"), Discrete(3), 1)
    assert f'File "{file}", line 2' in str(error.value)


@pytest.mark.parametrize(
    ("spec", "space", "expected"),
    [
        (
            ActorSpec("auto"),
            ArraySpec((4,), "float32", -math.inf, math.inf),
            "Network: mlp; inputs: observation (normalised numbers, shape [4])",
        ),
        (
            ActorSpec("deep", use_lstm=True),
            {"camera": ArraySpec((4, 84, 84), "uint8", 0, 255), "b": ArraySpec((), "bool")},
            "Network: deep with LSTM; "
            "inputs: b (numbers, shape []), camera (image, shape [4, 84, 84])",
        ),
        (
            ActorSpec("mlp"),
            {f"n{i}": ArraySpec((1,), "bool") for i in range(8)},
            "Network: mlp; inputs: "
            f"{', '.join(f'n{i} (numbers, shape [1])' for i in range(6))} and 2 more",
        ),
    ],
)
def test_an_agent_says_how_it_reads_each_part_of_an_observation(
    spec: ActorSpec, space: Any, expected: str
) -> None:
    assert describe_agent(make_agent(spec, space, Discrete(2), 1)) == expected


def test_a_network_of_a_script_may_have_the_name_of_a_built_in_one(user_module: str) -> None:
    pytest.importorskip("cloudpickle")
    base = importlib.import_module(user_module).MyNet
    own = type("mlp", (base,), {"__module__": "__main__"})
    assert isinstance(make_model(ActorSpec.of(own), OBSERVATION, ACTIONS), base)


def test_a_network_of_a_script_is_loaded_by_its_name_in_the_same_script(
    user_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = importlib.import_module(user_module).MyNet
    own = type("OfScript", (base,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "OfScript", own, raising=False)
    recorded = ActorSpec.naming(own).name
    assert isinstance(make_model(ActorSpec(recorded), OBSERVATION, ACTIONS), own)
