# SPDX-License-Identifier: Apache-2.0
"""Torsos of names against the formulas in words: one-hot vectors, tables, strings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchbeast.core.actors.encoders import (
    NAME_SIZE,
    MapTorso,
    NamesTorso,
    OneHotTorso,
    StringsTorso,
    name_table,
)
from torchbeast.core.envs.spaces import ArraySpec

N = 7


def test_a_number_is_one_hot_from_the_space_and_not_from_what_was_seen() -> None:
    torso = OneHotTorso(ArraySpec((), "int64", categories=(5,), start=(-1,)), 4)
    values = torch.tensor([-1, 0, 3, 3])
    ones = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1.0]])
    torch.testing.assert_close(torso(values), F.relu(torso.linear(ones)))
    assert torso.linear.in_features == 5


def test_several_numbers_have_ones_of_their_own() -> None:
    torso = OneHotTorso(ArraySpec((3,), "int64", categories=(2, 3, 4), start=(0, 1, 0)), 6)
    values = torch.stack([torch.randint(n, (N,)) for n in (2, 3, 4)], 1)
    ones = torch.cat([F.one_hot(values[:, i], n) for i, n in enumerate((2, 3, 4))], 1).float()
    expected = F.relu(torso.linear(ones))
    torch.testing.assert_close(torso(values + torch.tensor([0, 1, 0])), expected)


def test_equal_counts_have_ones_of_their_own_too() -> None:
    torso = OneHotTorso(ArraySpec((2, 2), "int32", categories=(3,)), 6)
    values = torch.randint(3, (N, 2, 2), dtype=torch.int32)
    ones = F.one_hot(values.long().flatten(1), 3).float().flatten(1)
    torch.testing.assert_close(torso(values), F.relu(torso.linear(ones)))


def test_one_hot_starts_as_large_with_many_categories_as_with_few() -> None:
    def size(count: int) -> float:
        torch.manual_seed(0)
        torso = OneHotTorso(ArraySpec((), "int64", categories=(count,)), 1000)
        return torso(torch.zeros(1, dtype=torch.int64)).square().mean().item()

    assert size(500) == pytest.approx(size(5), rel=0.2)


def test_names_are_rows_of_a_table_that_all_entries_share() -> None:
    torso = NamesTorso(ArraySpec((4,), "int16", 10, 5976), 6)
    values = torch.randint(10, 5977, (N, 4)).to(torch.int16)
    named = torso.table.weight[values.long() - 10]
    torch.testing.assert_close(torso(values), F.relu(torso.linear(named.flatten(1))))
    assert len(torso.table.weight) == 5967


def test_entries_with_other_counts_have_tables_of_their_own() -> None:
    torso = NamesTorso(ArraySpec((2,), "int64", categories=(1000, 2000)), 6)
    values = torch.tensor([[0, 0], [999, 1999]])
    named = torso.table.weight[torch.tensor([[0, 1000], [999, 2999]])]
    torch.testing.assert_close(torso(values), F.relu(torso.linear(named.flatten(1))))


def test_entries_that_only_start_elsewhere_share_a_table() -> None:
    """Its size must not grow with their number: a server that says so may be anybody's."""
    torso = NamesTorso(ArraySpec((3,), "int64", categories=(2000,), start=(0, -5, 9)), 6)
    values = torch.tensor([[0, -5, 9], [7, 7, 10]])
    named = torso.table.weight[torch.tensor([[0, 0, 0], [7, 12, 1]])]
    torch.testing.assert_close(torso(values), F.relu(torso.linear(named.flatten(1))))
    assert len(torso.table.weight) == 2000


@pytest.mark.parametrize(("outside", "nearest"), [(-4, 2), (-(2**62), 2), (9, 8), (2**62, 8)])
def test_a_value_outside_its_space_counts_as_the_nearest_inside(outside: int, nearest: int) -> None:
    spec = ArraySpec((2,), "int64", 2, 8)
    for torso in (NamesTorso(spec, 6), OneHotTorso(spec, 6)):
        seen = torso(torch.tensor([[outside, 3]]))
        torch.testing.assert_close(seen, torso(torch.tensor([[nearest, 3]])))


def test_the_first_number_of_a_name_is_its_place() -> None:
    weight = name_table((11,)).weight.detach()
    torch.testing.assert_close(weight[:, 0], torch.linspace(-1, 1, 11))
    both = name_table((3, 5)).weight.detach()
    places = torch.cat([torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 5)])
    torch.testing.assert_close(both[:, 0], places)
    others = name_table((5000,)).weight.detach()[:, 1:]
    assert float(others.square().sum(1).mean()) == pytest.approx(1, rel=0.3)


def by_hand(torso: MapTorso | StringsTorso, cells: Tensor) -> Tensor:
    """Convolutions of cells [N, H, W, C], by 2 until at most 64 cells are left."""
    x, stride = cells.permute(0, 3, 1, 2).contiguous(), 2 if cells[0, :, :, 0].numel() > 64 else 1
    for conv in torso.convs:
        x = F.relu(F.conv2d(x, conv.weight, conv.bias, stride=stride, padding=1))
    assert x[0, 0].numel() <= 64
    return x.flatten(1)


@pytest.mark.parametrize("shape", [(21, 79), (24, 80), (7, 7), (2, 3), (9, 8)])
def test_a_map_is_convolved_over_its_cells_names(shape: tuple[int, int]) -> None:
    torso = MapTorso(ArraySpec(shape, "int16", 0, 99))
    values = torch.randint(100, (N, *shape)).to(torch.int16)
    expected = by_hand(torso, torso.table.weight[values.long()])
    torch.testing.assert_close(torso(values), expected, rtol=1e-4, atol=1e-5)
    assert expected.shape == (N, torso.num_features)


def test_cells_with_several_names_join_their_vectors_wherever_channels_are() -> None:
    last = MapTorso(ArraySpec((7, 9, 3), "uint8", 0, 9))
    first = MapTorso(ArraySpec((3, 7, 9), "uint8", 0, 9))
    first.load_state_dict(last.state_dict())
    values = torch.randint(10, (N, 7, 9, 3), dtype=torch.uint8)
    named = last.table.weight[values.long()]
    expected = by_hand(last, torch.cat([named[:, :, :, i] for i in range(3)], -1))
    assert named.shape[-1] == NAME_SIZE
    torch.testing.assert_close(last(values), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first(values.permute(0, 3, 1, 2)), last(values))


@pytest.mark.parametrize("shape", [(21, 30, 20), (40, 60, 5), (5, 40, 60)])
def test_strings_go_through_one_layer_before_the_map_does(shape: tuple[int, int, int]) -> None:
    torso = StringsTorso(ArraySpec(shape, "uint8", 2, 129))
    frames = torch.randint(2, 130, (N, *shape), dtype=torch.uint8)
    values = frames.permute(0, 2, 3, 1) if shape[0] == 5 else frames
    scaled = (values.float() - 2) / 127
    expected = by_hand(torso, F.relu(scaled @ torso.linear.weight.T + torso.linear.bias))
    torch.testing.assert_close(torso(frames), expected, rtol=1e-4, atol=1e-5)


def test_a_letter_of_a_string_is_heard_wherever_it_stands() -> None:
    torso = StringsTorso(ArraySpec((21, 79, 80), "uint8", 0, 127))
    values = torch.zeros(1, 21, 79, 80, dtype=torch.uint8)
    before = torso(values)
    heard = 0
    for place in [(0, 0, 0), (20, 78, 79), (10, 40, 3)]:
        changed = values.clone()
        changed[(0, *place)] = 127
        heard += not torch.equal(torso(changed), before)
    assert heard == 3 and math.prod(values.shape) == 132_720
