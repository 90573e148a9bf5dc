# SPDX-License-Identifier: Apache-2.0
"""A leaf's torso follows from what its space says; docs/how-to/observations.md specifies it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from fake_nethack import FakeNetHack
from gymnasium import spaces
from test_networks import inputs_of

from torchbeast.core.actors.encoders import Kind, is_large_image, kind_of, needs_statistics
from torchbeast.core.actors.networks import AtariNet, DeepNet, MLPNet, NormedAtariNet, SmallNet
from torchbeast.core.actors.registry import default_model
from torchbeast.core.actors.torsos import DeepTorso, ShallowTorso, SmallTorso
from torchbeast.core.envs.spaces import ArraySpec, Discrete, observation_spec

INF = math.inf
# Gymnasium's space, what it is, and whether its numbers are normalised.
SPACES: list[tuple[Any, Kind, bool]] = [
    # names that the space declares
    (spaces.Discrete(4), Kind.ONE_HOT, False),
    (spaces.Discrete(500), Kind.ONE_HOT, False),
    (spaces.MultiDiscrete([3, 2, 7]), Kind.ONE_HOT, False),
    (spaces.MultiDiscrete(np.full((5, 5), 4)), Kind.ONE_HOT, False),
    (spaces.Discrete(5000), Kind.NAMES, False),
    (spaces.MultiDiscrete([2000, 2000]), Kind.NAMES, False),
    (spaces.MultiDiscrete(np.full((21, 79), 5977)), Kind.MAP, False),
    (spaces.Discrete(2**17), Kind.NUMBERS, True),
    (spaces.MultiBinary(9), Kind.NUMBERS, False),
    # images
    (spaces.Box(0, 255, (84, 84, 3), np.uint8), Kind.IMAGE, False),
    (spaces.Box(0, 255, (4, 84, 84), np.uint8), Kind.IMAGE, False),
    (spaces.Box(0, 255, (210, 160), np.uint8), Kind.IMAGE, False),
    (spaces.Box(0, 1, (3, 64, 64)), Kind.IMAGE, False),
    (spaces.Box(0, 1, (64, 64)), Kind.IMAGE, False),
    (spaces.Box(0, 255, (3, 64, 64)), Kind.IMAGE, False),
    (spaces.Box(0, 255, (28, 28)), Kind.IMAGE, False),
    (spaces.Box(0, 255, (40, 40, 3), np.int32), Kind.IMAGE, False),
    (spaces.Box(-INF, INF, (3, 64, 64)), Kind.IMAGE, True),
    (spaces.Box(-255, 255, (3, 64, 64)), Kind.IMAGE, True),
    (spaces.Box(0, 1, (10, 10, 4)), Kind.IMAGE, False),
    (spaces.Box(0, 1, (10, 10, 4), np.bool_), Kind.IMAGE, False),
    (spaces.Box(0, 1, (8, 8, 12), np.uint8), Kind.IMAGE, False),
    (spaces.MultiBinary([10, 10, 4]), Kind.IMAGE, False),
    # stacks of images
    (spaces.Box(0, 255, (4, 40, 40, 3), np.uint8), Kind.IMAGE, False),
    (spaces.Box(0, 255, (4, 40, 40, 1), np.uint8), Kind.IMAGE, False),
    (spaces.Box(0, 255, (4, 3, 40, 40), np.uint8), Kind.IMAGE, False),
    (spaces.Box(0, 255, (4, 10, 10, 3)), Kind.IMAGE, False),
    (spaces.MultiBinary([4, 10, 10, 4]), Kind.IMAGE, False),
    (spaces.Box(0, 255, (4, 7, 7, 3), np.uint8), Kind.MAP, False),
    # tables of features: windows, stacks of vectors
    (spaces.Box(-INF, INF, (24, 2)), Kind.NUMBERS, True),
    (spaces.Box(-1, 1, (24, 2)), Kind.NUMBERS, False),
    (spaces.Box(-INF, INF, (100, 70)), Kind.NUMBERS, True),
    (spaces.Box(-INF, INF, (5, 24, 2)), Kind.NUMBERS, True),
    (spaces.Box(-INF, INF, (4, 5, 24, 2)), Kind.NUMBERS, True),
    # bounded integers
    (spaces.Box(0, 255, (128,), np.uint8), Kind.NAMES, False),
    (spaces.Box(-5, 5, (2,), np.int64), Kind.NAMES, False),
    (spaces.Box(0, 5976, (55,), np.int16), Kind.NAMES, False),
    (spaces.Box(0, 255, (7, 7, 3), np.uint8), Kind.MAP, False),
    (spaces.Box(0, 9, (9, 9), np.int32), Kind.MAP, False),
    (spaces.Box(0, 255, (24, 80), np.uint8), Kind.MAP, False),
    (spaces.Box(0, 127, (21, 79, 80), np.uint8), Kind.STRINGS, False),
    (spaces.Box(0, 15, (4, 84, 84), np.uint8), Kind.STRINGS, False),
    (spaces.Box(0, 1, (5,), np.int32), Kind.NUMBERS, False),
    # amounts
    (spaces.Box(0, 10**6, (5,), np.int32), Kind.NUMBERS, True),
    (spaces.Box(-(2**63), 2**63 - 1, (5,), np.int64), Kind.NUMBERS, True),
    (spaces.Box(-(2**31), 2**31 - 1, (10, 10), np.int32), Kind.NUMBERS, True),
    (
        spaces.Box(np.array([-1, -1, -8.0]), np.array([1, 1, 8.0]), dtype=np.float64),
        Kind.NUMBERS,
        True,
    ),
    (spaces.Box(np.array([0, -1.0]), np.array([100, 1.0])), Kind.NUMBERS, True),
    (spaces.Box(np.array([0, -1.0]), np.array([101, 1.0])), Kind.NUMBERS, True),
    (spaces.Box(np.array([0, -1.0]), np.array([1, 1.0])), Kind.NUMBERS, False),
    (spaces.Box(0, 100, (10, 10, 4)), Kind.IMAGE, True),
    (spaces.Box(-INF, INF, (17,), np.float64), Kind.NUMBERS, True),
    (spaces.Box(0, 1000, (3,)), Kind.NUMBERS, True),
    (spaces.Box(0, INF, ()), Kind.NUMBERS, True),
]


@pytest.mark.parametrize(("space", "kind", "normalised"), SPACES, ids=lambda value: str(value))
def test_a_leaf_is_what_its_space_says(space: Any, kind: Kind, normalised: bool) -> None:
    spec = observation_spec(space)
    assert isinstance(spec, ArraySpec)
    assert (kind_of(spec), needs_statistics(spec)) == (kind, normalised)


# Without a space, as from servers of the original: by dtype and shape.
@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "normalised"),
    [
        ((4, 84, 84), "uint8", Kind.IMAGE, False),
        ((10, 5), "float32", Kind.NUMBERS, False),
        ((3, 64, 64), "float32", Kind.IMAGE, False),
        ((10, 10, 4), "bool", Kind.IMAGE, False),
        ((5,), "uint8", Kind.NUMBERS, False),
        ((5,), "float64", Kind.NUMBERS, False),
        ((), "bool", Kind.NUMBERS, False),
        ((5,), "int16", Kind.NUMBERS, True),
        ((), "int64", Kind.NUMBERS, True),
        ((21, 79), "int16", Kind.NUMBERS, True),
        ((0,), "int64", Kind.NUMBERS, False),
    ],
)
def test_a_leaf_without_a_space_is_told_by_dtype_and_shape(
    shape: tuple[int, ...], dtype: str, kind: Kind, normalised: bool
) -> None:
    spec = ArraySpec(shape, dtype)
    assert (kind_of(spec), needs_statistics(spec)) == (kind, normalised)


def test_nethack_has_no_image() -> None:
    kinds = {name: kind_of(spec) for name, spec in _nethack().items()}
    assert kinds == {
        "blstats": Kind.NUMBERS,
        "chars": Kind.MAP,
        "colors": Kind.MAP,
        "glyphs": Kind.MAP,
        "inv_glyphs": Kind.NAMES,
        "inv_letters": Kind.NAMES,
        "inv_oclasses": Kind.NAMES,
        "inv_strs": Kind.MAP,
        "message": Kind.NAMES,
        "screen_descriptions": Kind.STRINGS,
        "specials": Kind.MAP,
        "tty_chars": Kind.MAP,
        "tty_colors": Kind.MAP,
        "tty_cursor": Kind.NAMES,
    }


def _nethack() -> dict[str, ArraySpec]:
    spec: Any = observation_spec(FakeNetHack.observation_space)
    return spec


NETS = [DeepNet, AtariNet, NormedAtariNet, SmallNet, MLPNet]


@pytest.mark.parametrize("net", NETS)
def test_every_network_reads_nethack_without_a_network_for_images(net: Any) -> None:
    model = net(_nethack(), Discrete(23), False)
    of_images = (DeepTorso, ShallowTorso, SmallTorso)
    assert [module for module in model.modules() if isinstance(module, of_images)] == []
    assert sum(parameter.numel() for parameter in model.parameters()) < 6_000_000


@pytest.mark.parametrize(
    ("net", "space"),
    [
        *[(MLPNet, space) for space, _, _ in SPACES],
        *[(DeepNet, space) for space, kind, _ in SPACES if kind is Kind.IMAGE],
    ],
    ids=str,
)
def test_every_network_learns_from_every_leaf(net: Any, space: Any) -> None:
    spec = observation_spec(space)
    model = net(spec, Discrete(3), False)
    frames = torch.from_numpy(np.stack([[space.sample() for _ in range(3)] for _ in range(2)]))
    output = model(inputs_of(frames), ())
    (output.policy_logits.sum() + output.baseline.sum()).backward()
    assert output.baseline.isfinite().all()
    assert [n for n, p in model.named_parameters() if not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("net", [DeepNet, MLPNet])
def test_a_window_of_features_is_read_like_the_same_numbers_in_a_row(net: Any) -> None:
    """The second column is a signal of -1 and 1 next to numbers around 50,000."""
    frames = torch.stack([50_000 + 5_000 * torch.randn(6, 5, 8), torch.randn(6, 5, 8).sign()], -1)
    window, row = (
        net(ArraySpec(shape, "float32", -INF, INF), Discrete(3), False) for shape in ((8, 2), (16,))
    )
    row.load_state_dict(dict(window.named_parameters()), strict=False)
    outputs = []
    for model, seen in ((window, frames), (row, frames.flatten(2))):
        model.observe(seen)
        outputs.append(model(inputs_of(seen), ()))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("uint8", (96, 96, 3)), ("float32", (96, 96, 3)), ("bool", (10, 10, 4)), ("uint8", (7, 7, 3))],
)
def test_auto_selects_the_same_network_for_a_stack_of_images_as_for_one(
    dtype: str, shape: tuple[int, ...]
) -> None:
    one, stack = (ArraySpec(each, dtype, 0, 255) for each in (shape, (4, *shape)))
    assert default_model(stack, "deep") == default_model(one, "deep") != "mlp"


def test_a_large_image_has_36_pixels_a_side_and_64_without_channels() -> None:
    def large(*shape: int) -> bool:
        return is_large_image(ArraySpec(shape, "uint8", 0, 255))

    assert large(36, 36, 3) and large(1, 36, 40) and large(64, 64)
    assert not large(35, 36, 3) and not large(55, 80) and not large(84) and not large()
