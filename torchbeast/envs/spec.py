# SPDX-License-Identifier: Apache-2.0
"""Specs of environments: what a process needs to make them, and the flags that describe them.

The options are the same in every process of a run. EnvError says why an environment cannot be made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from torchbeast.core.base import checks
from torchbeast.core.base.specs import Spec
from torchbeast.core.envs.contract import check_keywords
from torchbeast.core.envs.tasks import dealt
from torchbeast.errors import UsageError, expanded

# A bare name needs one of old Gym's Atari versions: Gymnasium has its own Blackjack-v1.
ATARI_ID = re.compile(r"(?:ALE/(\w+)-v5|(\w+?)(NoFrameskip|Deterministic)?-v([04]))")


@dataclass(frozen=True, kw_only=True)
class EnvOptions(checks.Settings):
    """Options of `envs.make` that must be the same in every process of a run.

    They go to other processes as a dict, and into checkpoints as the flags of these names.
    """

    observation_keys: tuple[str, ...] = ()
    """Entries of a dict observation that the network sees, such as --observation_keys blstats
    inventory/glyphs; the workers drop the others. Default: all; with --mode test, the keys that the
    run recorded."""
    sticky_actions: float | None = checks.setting(None, "atari", bounds=(checks.below_one,))
    """Atari: probability, at each emulated frame, of repeating the previous action (Machado et al.
    2018). Default: 0.25 for ids such as ALE/Pong-v5 and Pong-v0, 0 for PongNoFrameskip-v4; with
    --mode test, the run's value."""
    frame_skip: int | None = checks.setting(None, "atari", bounds=(checks.at_least, 1))
    """Atari: emulated frames per action. Default: 4; with --mode test, the run's value."""
    full_action_space: bool = checks.setting(False, "atari")
    """Atari: offer all 18 actions of the console, not only the ones that the game uses."""
    mask_actions: bool = False
    """Never take actions that the environment's info["action_mask"] forbids, as in Taxi. The mask
    is added to the observation. Masks that are already part of the observation are always
    applied."""
    info_keywords: tuple[str, ...] = ()
    """Numbers to log from the info of each episode's last step, such as --info_keywords is_success
    x_position. Their means over the episodes of an update are logged as info_is_success and
    info_x_position."""
    task_shares: tuple[float, ...] = ()
    """Shares of the environments that play each task of --env "A,B,C", such as --task_shares 2 1 1.
    A host skips tasks with a share of 0: with 0 1 0, a PolyBeast host serves only the second task.
    Default: equal shares."""
    task_returns: tuple[float, ...] = ()
    """For each task, the two returns that are scaled to 0 and 1: --task_returns 0 25 0 80 scales 0
    to 25 in the first task and 0 to 80 in the second. The mean return of several tasks is then the
    mean of their scaled returns. Default: human-normalised scores of at most 1 for Atari games;
    unscaled returns otherwise."""
    task_input: bool = False
    """Also give the network the number of the task as an input. By default, the number only selects
    the value head, with impala, laser and ppo."""
    selfplay: str | None = None
    """Self-play in a game with several agents: folder for earlier versions of the trained agent,
    which control the other players. Use a new folder for each run, which every machine can access.
    info_elo in the log is the agent's rating; a random player has 0. Default: all agents are
    trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keywords = tuple(self.info_keywords)
        check_keywords(self.info_keywords)
        if self.selfplay:
            object.__setattr__(self, "selfplay", str(expanded(self.selfplay).absolute()))
            keywords = (*keywords, *(() if "elo" in keywords else ("elo",)))
        for name in ("observation_keys", "task_shares", "task_returns"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        pairs = zip(self.task_returns[::2], self.task_returns[1::2], strict=False)
        checks.require(
            len(self.task_returns) % 2 == 0 and all(-inf < low < high < inf for low, high in pairs),
            "task_returns must be pairs of a lower and a higher return, got "
            f"{' '.join(map(str, self.task_returns))}",
        )
        checks.require(
            all(0 <= share < inf for share in self.task_shares) and any(self.task_shares or (1,)),
            f"task_shares must be numbers from 0, and one of them above 0, got {self.task_shares}",
        )
        object.__setattr__(self, "info_keywords", keywords)
        keys = self.observation_keys
        checks.require(
            not self.mask_actions or not keys or "action_mask" in keys,
            f"mask_actions needs action_mask among the observation_keys, got {' '.join(keys)}",
        )

    @staticmethod
    def of(values: Mapping[str, Any]) -> EnvOptions:
        """Returns the options among these values; missing ones have their defaults."""
        names = {field.name for field in fields(EnvOptions)}
        return EnvOptions(**{name: value for name, value in values.items() if name in names})

    def or_else(self, others: EnvOptions) -> EnvOptions:
        """Returns these options, with the others' in place of defaults."""
        return replace(others, **self._chosen())

    def of_atari(self) -> list[str]:
        """Returns the names of options that are set and apply to Atari games only."""
        return [name for name in self._chosen() if name in checks.names_with("atari", self)]

    def _chosen(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


BUILT_IN = ("BitFlip", "Catch", "Dials", "Memory", "Mock")


class EnvError(UsageError):
    """An environment that cannot be made."""


def need(package: str, env_id: str, to_install: str) -> None:
    """Raises EnvError unless the package of an environment is installed; to_install: for pip."""
    if find_spec(package) is None:
        raise EnvError(
            f"{env_id} needs {package}, which is not installed: pip install {to_install}"
        )


@dataclass(frozen=True)
class EnvSpec(Spec):
    """An environment: its id, keyword arguments of its constructor, and options.

    Args:
        name: An id that `make_env` knows.
        kwargs: Keyword arguments of the constructor, as JSON has them.
        options: Options such as frame_skip.

    Example:
        ```python
        EnvSpec("FrozenLake-v1", {"is_slippery": False})
        ```
    """

    options: EnvOptions = field(default=EnvOptions(), kw_only=True)
    __repr__ = checks.short_repr

    @property
    def is_factory(self) -> bool:
        """Whether it is a user's own callable, or a list with one; "module:Id-v0" is an id of
        Gymnasium.
        """
        ids = r"pettingzoo:.*|.*-v\d+"
        return bool(self.pickled) or any(
            ":" in name and not re.fullmatch(ids, name) for name in self.task_names
        )

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks: of a single environment its own."""
        return [name.strip() for name in self.name.split(",")]

    @property
    def tasks(self) -> list[EnvSpec]:
        """The environments that the name lists; of a single one, itself."""
        names, options = self.task_names, self.options
        shares, pairs = len(options.task_shares), len(options.task_returns) // 2
        fits = len({*names}) == len(names) and {shares, pairs} <= {0, len(names)}
        if len(names) == 1:
            fits = not (shares or pairs or options.task_input)
        if not fits:
            raise EnvError(
                "task_shares, task_returns and task_input are for a list of different tasks: "
                f"{self.name} has {len({*names})}, and there are {shares} task_shares and {pairs} "
                "pairs of task_returns"
            )
        if options.selfplay and len(names) > 1:
            raise EnvError(f"selfplay is for one game, but {self.name} are several: remove it")
        options = replace(options, task_shares=(), task_returns=(), task_input=False)
        pickled = self.pickled.split(",") if self.pickled else [""] * len(names)
        return [
            EnvSpec(name, self.kwargs, options=options, pickled=source)
            for name, source in zip(names, pickled, strict=True)
        ]

    @staticmethod
    def of_tasks(tasks: Sequence[EnvSpec | str | Callable[..., Any]]) -> EnvSpec:
        """Returns the spec of a list of environments, the tasks of one agent.

        Args:
            tasks: Ids, specs, or functions.

        Raises:
            EnvError: If the list is empty, or their keyword arguments or options differ.
        """
        if not tasks:
            raise EnvError("expected at least one environment, got an empty list")
        specs = [task if isinstance(task, EnvSpec) else EnvSpec.of(task) for task in tasks]
        for spec in specs:
            if (spec.kwargs, spec.options) != (specs[0].kwargs, specs[0].options):
                raise EnvError(
                    f"the tasks of one agent have the same keyword arguments and options, but "
                    f"{specs[0]} and {spec} differ: put them into functions"
                )
        pickled = [spec.pickled for spec in specs]
        names = [  # those of notebooks' functions may be equal
            f"{spec.name}#{number}" if spec.pickled else spec.name
            for number, spec in enumerate(specs)
        ]
        return replace(
            specs[0], name=",".join(names), pickled=",".join(pickled) if any(pickled) else ""
        )

    def dealt(self, first: int, count: int) -> EnvSpec:
        """Returns the spec of some of the environments of all workers: its task_shares are the
        numbers of environments of each task.

        Args:
            first: Number of the first environment.
            count: Number of environments.
        """
        if len(names := self.task_names) == 1 or not count:
            return self
        return self.with_shares(dealt(self.options.task_shares or [1] * len(names), first, count))

    def with_shares(self, shares: Sequence[float] = ()) -> EnvSpec:
        """Returns the spec with other task_shares, by default equal ones."""
        return self.with_options(task_shares=shares)

    def with_options(self, **options: Any) -> EnvSpec:
        """Returns the spec with other values of these options."""
        return replace(self, options=replace(self.options, **options))

    @classmethod
    def from_parent(cls, value: Mapping[str, Any]) -> EnvSpec:
        """Reads the JSON that the parent process sent; missing options have their defaults."""
        return super().from_parent({**value, "options": EnvOptions.of(value.get("options", {}))})


DEFAULT_ENV = "PongNoFrameskip-v4"


@dataclass(frozen=True, kw_only=True)
class _EnvName:
    """The name of the environment. A separate class, so that --help lists it before the options."""

    env: str | None = checks.setting(None, "task")
    """An Atari name, Mock, Catch, any Gymnasium id, or package.module:factory for your own; or
    several tasks for one agent, as in "MinAtar/Breakout-v0,MinAtar/Asterix-v0".
    Default: PongNoFrameskip-v4; with --mode test, the run's environment. An environment to evaluate
    in must have the run's observation and action spaces."""
    env_kwargs: Mapping[str, Any] = checks.setting(dict, "task")
    """Keyword arguments of the environment's constructor as JSON, such as '{"size": 8}'. Default:
    none; with --mode test, the run's arguments. Recorded arguments of a package.module:factory are
    used again only if you repeat --env."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig(EnvOptions, _EnvName):
    """The environment."""

    @property
    def spec(self) -> EnvSpec:
        """The environment to train on, with its arguments and options."""
        name = DEFAULT_ENV if self.env is None else self.env
        return replace(self.asked, name=name)

    @property
    def asked(self) -> EnvSpec:
        """Spec of the environment to evaluate in; its name is empty for the run's environment."""
        options = EnvOptions.of(asdict(self))
        return EnvSpec(self.env or "", self.env_kwargs, options=options)


def is_atari(env_id: str) -> bool:
    """Returns whether the id names an Atari game, installed or not."""
    match = ATARI_ID.fullmatch(env_id)
    if not match:
        return env_id.startswith("ALE/")
    return match[1] is not None or match[3] is not None or match[2] in roms_of_ale()


def plays_atari(env_id: str) -> bool:
    """Returns whether the id names an Atari game of ALE or of EnvPool, such as envpool:Pong-v5, or
    a list of them.
    """
    names = env_id.split(",")
    if len(names) > 1:
        return all(plays_atari(name.strip()) for name in names)
    game = env_id.removeprefix("envpool:")
    return is_atari(game) or (game != env_id and game.removesuffix("-v5") in roms_of_ale())


def is_pool(env_id: str) -> bool:
    """Returns whether the id names a task of EnvPool, which steps many environments together."""
    return env_id.startswith("envpool:")


def game_of(env_id: str) -> str:
    """Returns the name of an Atari game in its id, "Pong"; other ids are returned as they are."""
    match = ATARI_ID.fullmatch(env_id.replace("envpool:", "ALE/"))
    return (match[1] or match[2]) if match else env_id


def roms_of_ale() -> dict[str, str]:
    """Returns ALE's games by their name in ids, {"MsPacman": "ms_pacman"}; {} without ALE."""
    package = find_spec("ale_py")
    if package is None or package.origin is None:
        return {}
    names = [path.stem for path in (Path(package.origin).parent / "roms").glob("*.bin")]
    return {name.title().replace("_", ""): name for name in names}
