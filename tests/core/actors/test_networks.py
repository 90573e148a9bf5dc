# SPDX-License-Identifier: Apache-2.0
"""The networks by name: their weights' names and shapes, what they compute, what they accept."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from later import later
from nets_by_hand import deep_by_hand, shallow_by_hand, shallow_norm_by_hand
from torch import Tensor

from torchbeast.core.actors.contract import ActorCritic, ModelInputs
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.networks import (
    AtariNet,
    DeepNet,
    LastAction,
    MLPNet,
    NormedAtariNet,
    SmallNet,
)
from torchbeast.core.actors.torsos import channels_first, image_shape
from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    ObservationSpace,
)

T, B, ACTIONS = 4, 3, 6
ATARI = ArraySpec((4, 84, 84), "uint8")
NETS = [DeepNet, AtariNet, NormedAtariNet, MLPNet, SmallNet]


def random_leaf(spec: ArraySpec, steps: int = T) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    shape = (steps, B, *spec.shape)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else _integers(shape, dtype)


def _integers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(2 if dtype == torch.bool else 128, shape).to(dtype)


def random_inputs(
    space: ObservationSpace, steps: int = T, num_actions: int = ACTIONS
) -> ModelInputs:
    return ModelInputs(
        observation=map_leaves(lambda spec: random_leaf(spec, steps), space),
        reward=2 * torch.randn(steps, B),
        done=torch.rand(steps, B) < 0.3,
        last_action=torch.randint(num_actions, (steps, B)),
    )


def inputs_of(observation: Tensor) -> ModelInputs:
    """Observations [T, B, ...] with rewards of 0."""
    steps, columns = observation.shape[:2]
    nothing = torch.zeros(steps, columns)
    return ModelInputs(observation, nothing, nothing.bool(), nothing.long())


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def with_biases(weights: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """{name.weight, name.bias} of layers given by name and shape of their weight."""
    both = {}
    for name, shape in weights.items():
        both[f"{name}.weight"] = shape
        both[f"{name}.bias"] = shape[:1]
    return both


def lstm_shapes(size: int, hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        named[f"core.weight_ih_l{layer}"] = (4 * hidden, size if layer == 0 else hidden)
        named[f"core.weight_hh_l{layer}"] = (4 * hidden, hidden)
        named[f"core.bias_ih_l{layer}"] = named[f"core.bias_hh_l{layer}"] = (4 * hidden,)
    return named


@pytest.mark.parametrize("net", [AtariNet, NormedAtariNet])
@pytest.mark.parametrize("use_lstm", [False, True])
def test_the_shallow_nets_have_the_names_and_shapes_of_published_checkpoints(
    net: Any, use_lstm: bool
) -> None:
    core = 512 + 1 + ACTIONS
    expected = with_biases(
        {
            "conv1": (32, 4, 8, 8),
            "conv2": (64, 32, 4, 4),
            "conv3": (64, 64, 3, 3),
            "fc": (512, 3136),
            "policy": (ACTIONS, core),
            "baseline": (1, core),
        }
    )
    if use_lstm:
        expected |= lstm_shapes(core, core, layers=2)
    assert shapes(net(ATARI, Discrete(ACTIONS), use_lstm)) == expected


@pytest.mark.parametrize("use_lstm", [False, True])
def test_the_deep_net_has_the_names_and_shapes_of_published_checkpoints(use_lstm: bool) -> None:
    weights: dict[str, tuple[int, ...]] = {}
    for section, (before, after) in enumerate([(4, 16), (16, 32), (32, 32)]):
        weights[f"feat_convs.{section}.0"] = (after, before, 3, 3)
        for block in ("resnet1", "resnet2"):
            weights[f"{block}.{section}.1"] = weights[f"{block}.{section}.3"] = (after, after, 3, 3)
    core = 256 if use_lstm else 257
    heads = {"fc": (256, 3872), "policy": (ACTIONS, core), "baseline": (1, core)}
    expected = with_biases({**weights, **heads})
    if use_lstm:
        expected |= lstm_shapes(257, 256, layers=1)
    assert shapes(DeepNet(ATARI, Discrete(ACTIONS), use_lstm)) == expected


@pytest.mark.parametrize(
    ("net", "first", "last"),
    [
        (AtariNet, "conv1.weight", "baseline.bias"),
        (DeepNet, "feat_convs.0.0.weight", "baseline.bias"),
    ],
)
def test_weights_come_in_the_original_order(net: Any, first: str, last: str) -> None:
    names = list(net(ATARI, Discrete(ACTIONS), True).state_dict())
    assert (names[0], names[-1]) == (first, last)
    groups = [name.split(".")[0] for name in names]
    assert list(dict.fromkeys(groups))[-4:] == ["fc", "core", "policy", "baseline"]


BY_HAND: list[Any] = [
    (AtariNet, shallow_by_hand),
    (NormedAtariNet, shallow_norm_by_hand),
    (DeepNet, deep_by_hand),
]


def test_the_small_net_is_one_convolution_and_a_layer_of_128() -> None:
    board = ArraySpec((10, 10, 4), "bool")
    core = 128 + 1 + ACTIONS
    weights = {"conv": (16, 4, 3, 3), "fc": (128, 16 * 8 * 8)}
    heads = {"policy": (ACTIONS, core), "baseline": (1, core)}
    assert shapes(SmallNet(board, Discrete(ACTIONS), False)) == with_biases(weights | heads)


@pytest.mark.parametrize(("net", "by_hand"), BY_HAND)
@pytest.mark.parametrize("use_lstm", [False, True])
def test_the_atari_nets_compute_what_their_description_says(
    net: Any, by_hand: Any, use_lstm: bool
) -> None:
    model, inputs = net(ATARI, Discrete(ACTIONS), use_lstm), random_inputs(ATARI)
    assert inputs.reward.abs().max() > 1, "nothing to clamp"
    assert inputs.done[1:].any(), "no state to forget"
    output = model(inputs, model.initial_state(B))
    logits, baseline = by_hand(model.state_dict(), inputs)
    torch.testing.assert_close(output.policy_logits, logits)
    torch.testing.assert_close(output.baseline, baseline)


@pytest.mark.parametrize("net", NETS)
def test_norm_standardises_each_row_of_the_joint_layer_before_its_activation(net: Any) -> None:
    model, inputs = net(ATARI, Discrete(ACTIONS), False, norm=True), random_inputs(ATARI)
    seen: list[Tensor] = []
    model.fc.register_forward_hook(lambda module, given, output: seen.append(output))
    features, _ = model._run(inputs, (), model)
    (linear,) = seen
    mean, mean_square = linear.mean(-1, keepdim=True), linear.square().mean(-1, keepdim=True)
    expected = (linear - mean) / (mean_square - mean.square() + 1e-5).sqrt()
    found = features[..., : linear.shape[-1]].reshape(linear.shape)
    after = expected.tanh() if net is MLPNet else expected.clamp(min=0)
    torch.testing.assert_close(found, after, atol=1e-4, rtol=1e-4)
    assert "norm.weight" in model.state_dict()
    assert not any("norm." in name for name in net(ATARI, Discrete(ACTIONS), False).state_dict())


@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize("shared_body", [True, False])
def test_both_layers_of_both_bodies_of_an_mlp_have_the_activation(
    name: str, shared_body: bool
) -> None:
    space = ArraySpec((3,), "float32")
    model = MLPNet(space, Discrete(ACTIONS), False, activation=name, shared_body=shared_body)
    function = {"relu": torch.relu, "tanh": torch.tanh}[name]
    inputs = random_inputs(space)
    rows = inputs.observation.flatten(0, 1)  # type: ignore[union-attr]
    for body in (model,) if shared_body else (model, model.value_body):
        features, _ = body._run(inputs, (), body)  # type: ignore[union-attr]
        first = function(body.leaf_torsos[0].linear(rows))  # type: ignore[union-attr]
        expected = function(body.fc(first))  # type: ignore[union-attr]
        found = features[..., : expected.shape[-1]].reshape(expected.shape)
        torch.testing.assert_close(found, expected)


def test_only_the_mlp_has_tanh_by_default() -> None:
    space, inputs = ArraySpec((3,), "float32"), random_inputs(ArraySpec((3,), "float32"))
    for net in NETS:
        model = net(space, Discrete(ACTIONS), False)
        features, _ = model._run(inputs, (), model)
        negative = features[..., :128] < 0  # no layer is narrower; what follows is no activation
        assert bool(negative.any()) == (net is MLPNet), net


def gradients(model: ActorCritic, inputs: ModelInputs) -> dict[str, Tensor]:
    """Of a random mixture of the outputs."""
    output = model(inputs, model.initial_state(B))
    return mixture_gradients(dict(model.named_parameters()), output.policy_logits, output.baseline)


def mixture_gradients(w: dict[str, Tensor], logits: Tensor, baseline: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mixture = (logits * torch.randn(logits.shape, generator=generator)).sum()
    mixture = mixture + (baseline * torch.randn(baseline.shape, generator=generator)).sum()
    return dict(zip(w, torch.autograd.grad(mixture, list(w.values())), strict=True))


def test_the_shallow_net_starts_as_pytorch_starts_its_layers_in_turn() -> None:
    torch.manual_seed(7)
    core = 512 + 1 + ACTIONS
    layers = [
        torch.nn.Conv2d(4, 32, 8, 4),
        torch.nn.Conv2d(32, 64, 4, 2),
        torch.nn.Conv2d(64, 64, 3, 1),
        torch.nn.Linear(3136, 512),
        torch.nn.LSTM(core, core, 2),
        torch.nn.Linear(core, ACTIONS),
        torch.nn.Linear(core, 1),
    ]
    expected = [tensor for layer in layers for tensor in layer.state_dict().values()]
    torch.manual_seed(7)
    started = AtariNet(ATARI, Discrete(ACTIONS), True).state_dict().values()
    assert len(expected) == len(started)
    assert all(torch.equal(a, b) for a, b in zip(started, expected, strict=True))


@pytest.mark.parametrize(("net", "by_hand"), BY_HAND)
def test_gradients_equal_those_with_channels_first_in_memory(net: Any, by_hand: Any) -> None:
    model, inputs = net(ATARI, Discrete(ACTIONS), False), random_inputs(ATARI)
    assert inputs.observation.is_contiguous()
    weights = dict(model.named_parameters())
    expected = mixture_gradients(weights, *by_hand(weights, inputs))
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("net", [AtariNet, DeepNet, MLPNet])
def test_features_in_bfloat16_change_outputs_and_gradients_by_little(
    net: Any, use_lstm: bool
) -> None:
    """bfloat16 has eight bits. The errors of single gradients are noise that adds up over the
    layers, 5 to 30 % in the first convolution; that of all together is smaller.
    """
    model, inputs = net(ATARI, Discrete(ACTIONS), use_lstm), random_inputs(ATARI)
    plain, plain_gradients = model(inputs, model.initial_state(B)), gradients(model, inputs)
    model.compute_dtype = torch.bfloat16
    fast, fast_gradients = model(inputs, model.initial_state(B)), gradients(model, inputs)
    for a, b in zip(flatten(tuple(fast)), flatten(tuple(plain)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
    assert not torch.equal(fast.policy_logits, plain.policy_logits)
    for name, gradient in fast_gradients.items():
        assert gradient.dtype == torch.float32
        assert (gradient - plain_gradients[name]).norm() < 0.5 * plain_gradients[name].norm(), name
    every, plain_every = (
        torch.cat([g.flatten() for g in of.values()]) for of in (fast_gradients, plain_gradients)
    )
    assert (every - plain_every).norm() < 0.1 * plain_every.norm()


SMALL: list[ObservationSpace] = [
    ArraySpec((1, 40, 52), "uint8"),
    ArraySpec((10, 5), "float32"),
    ArraySpec((10, 10, 4), "bool"),
    ArraySpec((48, 40, 3), "uint8"),
    ArraySpec((4,), "float64"),
    ArraySpec((), "int64"),
    {"image": ArraySpec((3, 36, 36), "uint8"), "inventory": ArraySpec((7,), "float32")},
    (ArraySpec((3, 36, 36), "uint8"), {"map": ArraySpec((1, 36, 36), "float32")}),
]


@pytest.mark.parametrize("space", SMALL, ids=str)
@pytest.mark.parametrize("use_lstm", [False, later(True)])
@pytest.mark.parametrize("net", NETS)
def test_other_observations_work(net: Any, use_lstm: bool, space: ObservationSpace) -> None:
    model = net(space, Discrete(ACTIONS), use_lstm)
    output = model(random_inputs(space), model.initial_state(B))
    assert output.policy_logits.shape == (T, B, ACTIONS)
    assert output.baseline.shape == (T, B)
    (output.policy_logits.sum() + output.baseline.sum()).backward()
    without = [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ]
    assert without == []


@pytest.mark.parametrize("net", NETS)
def test_every_leaf_of_a_dict_observation_counts(net: Any) -> None:
    space = SMALL[6]
    model, inputs = net(space, Discrete(ACTIONS), False), random_inputs(space)
    before = model(inputs, ()).policy_logits
    for name in ("image", "inventory"):
        changed = {**inputs.observation, name: inputs.observation[name] + 1}
        after = model(inputs._replace(observation=changed), ()).policy_logits
        assert not torch.equal(before, after), name


@pytest.mark.parametrize("net", NETS)
def test_bytes_are_divided_by_255_and_floats_are_not(net: Any) -> None:
    model = net(ArraySpec((2, 36, 36), "uint8"), Discrete(ACTIONS), False)
    inputs = random_inputs(ArraySpec((2, 36, 36), "uint8"))
    as_floats = inputs._replace(observation=inputs.observation.float() / 255.0)
    torch.testing.assert_close(model(inputs, ()), model(as_floats, ()))
    undivided = inputs._replace(observation=inputs.observation.float())
    assert not torch.allclose(model(inputs, ()).baseline, model(undivided, ()).baseline)


def test_the_shallow_norm_net_sees_the_same_in_a_dim_image_and_a_bright_one() -> None:
    model, inputs = NormedAtariNet(ATARI, Discrete(ACTIONS), False), random_inputs(ATARI)
    dim = inputs._replace(observation=inputs.observation // 2)
    bright = inputs._replace(observation=dim.observation + 100)
    torch.testing.assert_close(model(bright, ()), model(dim, ()))


@pytest.mark.parametrize("level", [0, 87, 255])
def test_a_plain_field_pulls_at_no_filter_of_the_shallow_norm_net(level: int) -> None:
    model = NormedAtariNet(ATARI, Discrete(ACTIONS), False)
    inputs = random_inputs(ATARI)
    plain = inputs._replace(observation=torch.full_like(inputs.observation, level))
    model(plain, ()).baseline.sum().backward()
    assert not model.conv1.weight.grad.any()


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((40, 48, 12), (2, 0, 1)),
        ((4, 3, 40, 48), (0, 1, 2, 3)),
        ((4, 40, 48, 3), (0, 3, 1, 2)),
        ((12, 40, 48, 1), (0, 3, 1, 2)),
        ((40, 48, 3, 4), (2, 3, 0, 1)),
    ],
)
@pytest.mark.parametrize("net", [DeepNet, AtariNet, SmallNet])
def test_channels_last_and_stacks_are_seen_as_one_image_with_channels_first(
    net: Any, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    plain = net(ArraySpec((12, 40, 48), "uint8"), Discrete(ACTIONS), False)
    other = net(ArraySpec(shape, "uint8"), Discrete(ACTIONS), False)
    other.load_state_dict(plain.state_dict())
    inputs = random_inputs(ArraySpec(shape, "uint8"))
    turned = inputs.observation.permute(0, 1, *(2 + place for place in order))
    folded = inputs._replace(observation=turned.reshape(T, B, 12, 40, 48))
    torch.testing.assert_close(other(inputs, ()), plain(folded, ()))


@pytest.mark.parametrize("net", NETS)
def test_done_may_be_bytes_or_booleans(net: Any) -> None:
    space = ArraySpec((5,), "float32")
    model, inputs = net(space, Discrete(ACTIONS), True), random_inputs(space)
    assert inputs.done.any()
    state = map_leaves(torch.randn_like, model.initial_state(B))
    as_bytes = inputs._replace(done=inputs.done.to(torch.uint8))
    torch.testing.assert_close(model(as_bytes, state), model(inputs, state))


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_forward_draws_no_random_number(net: Any, use_lstm: bool) -> None:
    space = ArraySpec((5,), "float32")
    model, inputs = net(space, Discrete(ACTIONS), use_lstm), random_inputs(space)
    before = torch.get_rng_state()
    model(inputs, model.initial_state(B))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_actions", [ACTIONS, 100])
@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_the_learners_forward_equals_acting_step_by_step(
    net: Any, use_lstm: bool, num_actions: int
) -> None:
    """With resets in some columns, and the last action being the one that was acted."""
    space, steps = ArraySpec((5,), "float32"), 12
    model = net(space, Discrete(num_actions), use_lstm)
    rows = random_inputs(space, steps)
    assert rows.done[1:].any()
    state = model.initial_state(B)
    last_action = model.distribution.zero_action((1, B))
    acted, last_actions = [], []
    for t in range(steps):
        row = ModelInputs(
            rows.observation[t : t + 1], rows.reward[t : t + 1], rows.done[t : t + 1], last_action
        )
        last_actions.append(last_action)
        last_action, extras, state = model.act(row, state)
        acted.append(extras)
    learnt = model(rows._replace(last_action=torch.cat(last_actions)), model.initial_state(B))
    torch.testing.assert_close(learnt.policy_logits, torch.cat([a["policy_logits"] for a in acted]))
    torch.testing.assert_close(learnt.baseline, torch.cat([a["baseline"] for a in acted]))
    torch.testing.assert_close(learnt.core_state, map_leaves(torch.clone, state))


@pytest.mark.parametrize("num_actions", [ACTIONS, 100])
@pytest.mark.parametrize("net", [AtariNet, MLPNet])
def test_the_last_action_is_seen_and_the_reward_is_clamped(net: Any, num_actions: int) -> None:
    space = ArraySpec((5,), "float32")
    model = net(space, Discrete(num_actions), False)
    inputs = random_inputs(space, num_actions=num_actions)
    other = inputs._replace(last_action=(inputs.last_action + 1) % num_actions)
    assert not torch.equal(model(inputs, ()).policy_logits, model(other, ()).policy_logits)
    big, bigger = (inputs._replace(reward=torch.full((T, B), r)) for r in (1.0, 50.0))
    assert torch.equal(model(big, ()).policy_logits, model(bigger, ()).policy_logits)


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_only_the_policy_layer_and_the_table_of_actions_grow_with_the_number_of_actions(
    net: Any, use_lstm: bool
) -> None:
    space = ArraySpec((5,), "float32")
    small, large = (shapes(net(space, Discrete(n), use_lstm)) for n in (100, 2000))
    grown = {name for name in small if small[name] != large[name]}
    assert small.keys() == large.keys()
    assert grown - {"last_action.table"} == {"policy.weight", "policy.bias"}


@pytest.mark.parametrize("space", [Discrete(64), MultiDiscrete((32, 32))], ids=str)
def test_up_to_64_choices_of_a_last_action_are_one_hot(space: ActionSpace) -> None:
    seen = LastAction(distribution_for(space))
    assert shapes(seen) == {} and seen.num_features == 64


def test_the_embedding_of_a_last_action_is_the_sum_of_its_choices_rows() -> None:
    seen = LastAction(distribution_for((Discrete(100, start=7), MultiDiscrete((50, 70)))))
    action = (torch.tensor([7, 12]), torch.tensor([[0, 0], [49, 69]]))
    table = seen.table
    assert table is not None
    rows = torch.stack([table[[0, 100, 150]].sum(0), table[[5, 149, 219]].sum(0)])
    torch.testing.assert_close(seen(action), rows)


@pytest.mark.parametrize("net", [AtariNet, NormedAtariNet])
def test_the_embedding_of_an_action_starts_about_as_long_as_a_one_hot_vector(net: Any) -> None:
    model = net(ArraySpec((5,), "float32"), Discrete(1000), False)
    lengths = model.last_action.table.detach().norm(dim=1)
    assert lengths.mean() == pytest.approx(1, abs=0.1) and lengths.min() > 0.3


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    ("how", "formula"),
    [
        ("abs_one", lambda r: max(-1.0, min(1.0, r))),
        ("none", lambda r: math.copysign(math.log(1.0 + abs(r)), r)),
    ],
)
def test_the_reward_is_seen_as_the_formula_has_it(net: Any, how: Any, formula: Any) -> None:
    """The heads are linear in it, so the weight behind the features shows it."""
    space, rewards = ArraySpec((5,), "float32"), [0.0, 0.3, -0.7, 1.0, 5.0, -40.0, 1e30, 3e-4]
    model = net(space, Discrete(ACTIONS), False)
    model.reward_input = how
    inputs = ModelInputs(
        observation=torch.randn(5).expand(1, 8, 5),
        reward=torch.tensor([rewards]),
        done=torch.zeros(1, 8, dtype=torch.bool),
        last_action=torch.ones(1, 8, dtype=torch.int64),
    )
    logits = model(inputs, ()).policy_logits.detach()[0]
    seen = torch.tensor([formula(reward) for reward in rewards])
    weight = model.policy.weight.detach()[:, model.fc.out_features]
    torch.testing.assert_close(logits - logits[:1], seen[:, None] * weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("net", NETS)
def test_nested_actions_size_the_policy(net: Any) -> None:
    space = ArraySpec((5,), "float32")
    action_space = {
        "keys": MultiBinary((3,)),
        "move": (Discrete(4, start=1), MultiDiscrete((2, 3))),
        "aim": Box(-1.0, 1.0, (2,)),
    }
    actions = distribution_for(action_space)
    model = net(space, action_space, True)
    inputs = random_inputs(space)._replace(last_action=actions.zero_action((T, B)))
    logits = model(inputs, model.initial_state(B)).policy_logits
    assert logits.shape == (T, B, 3 + 4 + 5 + 4)


@pytest.mark.parametrize("net", NETS)
def test_a_copy_of_a_net_shares_no_weight_with_it(net: Any) -> None:
    space = ArraySpec((36, 36), "float32")
    model, inputs = net(space, Discrete(ACTIONS), False), random_inputs(space)
    before = model(inputs, ())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(twin(inputs, ()), before)
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(inputs, ()), model(inputs, ()))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((10, 10, 10), (10, 10, 10)),  # MinAtar's Seaquest
        ((8, 8, 111), (111, 8, 8)),
        ((9, 9, 17), (17, 9, 9)),
        ((16, 9, 9), (16, 9, 9)),
        ((4, 10, 10, 10), (40, 10, 10)),
    ],
)
def test_a_board_with_many_planes_is_read_as_a_square(
    shape: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    assert image_shape(shape) == expected


def test_a_cube_has_its_channels_last() -> None:
    frames = torch.rand(2, 10, 10, 10)
    assert torch.equal(channels_first(frames), frames.permute(0, 3, 1, 2))
