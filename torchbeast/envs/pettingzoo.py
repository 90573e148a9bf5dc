# SPDX-License-Identifier: Apache-2.0
"""PettingZoo's environments of several agents (Terry et al. 2021, arXiv:2009.14471).

An id is `pettingzoo:`, the family and the environment: pettingzoo:classic/connect_four_v3.
docs/how-to/several-agents.md says how agents become environments; `core/envs/agents.py` does it.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from torchbeast.core.base.checks import did_you_mean
from torchbeast.core.base.specs import check_takes, import_module
from torchbeast.core.envs.agents import AgentsEnv
from torchbeast.envs.spec import EnvError, EnvSpec

PREFIX = "pettingzoo:"

_PACKAGES = {"mpe": "mpe2"}  # families that have left PettingZoo


def make(spec: EnvSpec, num_envs: int) -> AgentsEnv:
    """Makes games for num_envs agents of an id like pettingzoo:mpe/simple_spread_v3.

    spec: its kwargs are arguments of the environment. Raises EnvError if it does not exist.
    """
    module = _module(spec.name)
    made: Any = getattr(module, "parallel_env", None) or module.env
    check_takes(made, spec.kwargs, spec.name)
    make_game = functools.partial(made, **spec.kwargs)
    return AgentsEnv(make_game(), make_game, num_envs, spec.name)


def _module(env_id: str) -> Any:
    """Imports the module of an environment."""
    family, slash, name = env_id.removeprefix(PREFIX).partition("/")
    if not slash:
        raise EnvError(
            f"{env_id} names no environment: give the family too, as in "
            f"{PREFIX}mpe/simple_spread_v3"
        )
    package = _PACKAGES.get(family, f"pettingzoo.{family}")
    root = package.partition(".")[0]
    if find_spec(root) is None:
        raise EnvError(f"{env_id} needs the package {root}: pip install 'torchbeast[pettingzoo]'")
    if find_spec(package) is None:
        families = [*_PACKAGES, *_names(root)]
        raise EnvError(f"{env_id}: PettingZoo has no {family}{did_you_mean(family, families)}")
    known = [each for each in _names(package) if each.rpartition("_v")[2].isdigit()]
    if name not in known:
        hint = did_you_mean(name, known)
        raise EnvError(f"{env_id}: {family} has no {name}{hint or ': it has ' + ', '.join(known)}")
    return import_module(f"{package}.{name}", env_id)


def _names(package: str) -> list[str]:
    """Returns the names of a package's modules."""
    found = find_spec(package)
    assert found is not None
    return [each.name for each in iter_modules(found.submodule_search_locations)]
