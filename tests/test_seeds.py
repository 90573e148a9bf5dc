# SPDX-License-Identifier: Apache-2.0
"""Every path in the tree of seeds has its own seed, the same on every machine."""

from __future__ import annotations

import itertools

from torchbeast.seeds import seed_of


def test_the_same_path_gives_the_same_seed_on_every_machine() -> None:
    assert seed_of(0) == 1_484_405_855
    assert seed_of(7, "actor", 3, 0) == 1_291_084_243
    assert seed_of(7, "actor", 3, "environments") == 389_850_330


def test_different_paths_have_different_seeds() -> None:
    parts = ["actor", "environments", "actions", 0, 1, 2, 255]
    paths = [path for length in range(4) for path in itertools.product(parts, repeat=length)]
    seeds = {seed_of(root, *path) for root in range(5) for path in paths}
    assert len(seeds) == 5 * len(paths)


def test_no_two_actors_of_a_run_share_a_seed() -> None:
    seeds = [seed_of(0, "actor", index, life) for index in range(300) for life in range(5)]
    assert len(set(seeds)) == len(seeds)


def test_the_root_may_be_any_large_number() -> None:
    roots = [0, 1, 2**31, 2**32, 2**63, 2**100]
    assert len({seed_of(root, "actor") for root in roots}) == len(roots)


def test_seeds_have_31_bits() -> None:
    seeds = [seed_of(0, index) for index in range(1000)]
    assert min(seeds) >= 0 and max(seeds) < 2**31
    assert max(seeds) > 2**30, "all 31 are used"
