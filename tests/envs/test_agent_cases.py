# SPDX-License-Identifier: Apache-2.0
"""What games of several agents may say of an agent, and what its rows then are, case by case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

from torchbeast import UsageError
from torchbeast.core.envs.vec_env import VecEnv, vec_env_of

REWARDS = {"a": 1.0, "b": 10.0}
Change = Callable[["Scripted", dict[str, Any]], Any]


class Scripted:
    """Agents a and b, who both go on but for what `changes` do to the steps of the first game."""

    possible_agents: ClassVar = ["a", "b"]

    def __init__(self, changes: dict[int, Change]) -> None:
        self._changes, self._games = changes, 0

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-10, 10, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.agents = 0, ["a", "b"]
        self._games += 1
        found = {"obs": self._seen(), "infos": {}}
        return self._changed(found)

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents), "every agent in `agents` has an action"
        self.time += 1
        ends = dict.fromkeys("ab", False)
        return self._changed({
            "obs": self._seen(),
            "rewards": dict(REWARDS),
            "ends": dict(ends),
            "cuts": dict(ends),
            "infos": {name: {"time": self.time} for name in "ab"},
        })  # fmt: skip

    def _seen(self) -> dict[str, Any]:
        return {name: np.array([self.time], np.float32) for name in "ab"}

    def _changed(self, found: dict[str, Any]) -> Any:
        change = self._changes.get(self.time) if self._games == 1 else None
        changed = change and change(self, found)
        return tuple(found.values()) if changed is None else changed


def does(**changes: Any) -> Change:
    """Returns a change: `agents` sets the list, another name updates a dict; None removes b."""

    def change(game: Scripted, found: dict[str, Any]) -> None:
        for name, value in changes.items():
            if name == "agents":
                game.agents = list(value)
            elif value is None:
                found[name].pop("b")
            else:
                found[name].update(value)

    return change


def returns(result: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda game, found: result(found)


def does_and_returns(result: Callable[[dict[str, Any]], Any], **changes: Any) -> Change:
    def change(game: Scripted, found: dict[str, Any]) -> Any:
        does(**changes)(game, found)
        return result(found)

    return change


def older(found: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the four values of PettingZoo's older interface."""
    return found["obs"], found["rewards"], found["ends"], found["infos"]


ALL, B = {"a": True, "b": True}, {"b": True}
END_A = does(ends={"a": True}, agents="")
NOTHING = does(agents="", obs=None, rewards=None, ends=None, cuts=None, infos=None)


class Case(NamedTuple):
    """Rows of the agents, step by step: the reward, with T where it terminated and C where it was
    cut; - is a row of an agent that had no episode. / : the next game begins.
    """

    name: str
    changes: dict[int, Change]
    a: str
    b: str
    b_info: dict[str, Any] | None = None  # of its end


CASES = [
    Case("all end and leave", {2: does(ends=ALL, agents="")}, "1 1T/ 1", "10 10T/ 10"),
    Case("all end and stay in `agents`", {2: does(ends=ALL)}, "1 1T/ 1", "10 10T/ 10"),
    Case("all are cut and stay", {2: does(cuts=ALL)}, "1 1C/ 1", "10 10C/ 10"),
    Case("all leave without ends", {2: does(agents="")}, "1 1T/ 1", "10 10T/ 10"),
    Case("b leaves without a word", {1: NOTHING, 2: does(agents="")}, "1T/ 1", "0T/ 10", {}),
    Case("end and cut at once", {1: does(ends=B, cuts=ALL)}, "1C/ 1", "10T/ 10"),
    Case(
        "b terminates without a last observation",
        {2: does(ends=B, agents="a", obs=None), 3: END_A},
        "1 1 1T/ 1",
        "10 10T -/ 10",
        {"time": 2},
    ),
    Case(
        "b leaves without an end, and gets its last reward",
        {1: does(agents="a", obs=None, ends=None, cuts=None), 2: END_A},
        "1 1T/",
        "10T -/",
        {"time": 1},
    ),
    Case(
        "b is cut and leaves at once",
        {1: does(agents="a", cuts=B), 2: END_A},
        "1 1T/",
        "10C -/",
    ),
    Case(
        "b ends, stays in `agents` and is reported again",
        {1: does(ends=B), 2: does(ends=B), 3: does(ends=ALL)},
        "1 1 1T/ 1",
        "10T - -/ 10",
    ),
    Case(
        "b ends, stays in `agents` and is reported once",
        {1: does(ends=B), 3: does(ends={"a": True})},
        "1 1 1T/ 1",
        "10T - -/ 10",
    ),
    Case(
        "b ends and is rewarded afterwards",
        {1: does(ends=B, agents="a"), 2: does(rewards={"b": 77.0}), 3: END_A},
        "1 1 1T/",
        "10T - -/",
    ),
    Case(
        "b leaves and comes back",
        {1: does(agents="a"), 2: does(agents="ab"), 4: does(ends=ALL)},
        "1 1 1 1T/",
        "10T - 10 10T/",
    ),
    Case(
        "b joins late, and an observation before does not make it join",
        {0: does(agents="a"), 2: does(agents="ab"), 3: does(ends=ALL)},
        "1 1 1T/ 1",
        "- - 10T/ 10",
    ),
    Case(
        "b joins and has ended at once",
        {0: does(agents="a"), 1: does(agents="ab", ends=B), 3: does(ends=ALL)},
        "1 1 1T/",
        "- - -/",
    ),
    Case("four values", {1: returns(older), 2: does_and_returns(older, ends=ALL)},
        "1 1T/ 1", "10 10T/ 10"),
    Case(
        "four values, cut by a time limit",
        {1: does_and_returns(older, ends=ALL, infos={"b": {"TimeLimit.truncated": True}})},
        "1T/ 1",
        "10C/ 10",
    ),
    Case("observations alone from reset", {0: returns(lambda found: found["obs"]),
        1: does(ends=ALL)}, "1T/ 1", "10T/ 10"),
    Case("no infos", {1: does_and_returns(lambda found: (*[*found.values()][:4], None), ends=ALL)},
        "1T/", "10T/", {}),
    Case("no info of b", {1: does(ends=ALL, infos=None)}, "1T/", "10T/", {}),
    Case("infos of more than agents", {1: does(infos={"map": 3})}, "1 1", "10 10"),
    Case("numbers and arrays", {1: does(ends=dict.fromkeys("ab", np.int8(1)),
        rewards=dict.fromkeys("ab", np.array([2])))}, "2T/", "2T/"),
    Case("defaults of a dict", {1: returns(lambda found: (found["obs"], defaultdict(float),
        defaultdict(bool), found["cuts"], {}))}, "0 1", "0 10"),
]  # fmt: skip


def game_of(changes: dict[int, Change]) -> VecEnv:
    return vec_env_of(Scripted, {"changes": changes}, 2, "Game")


def rows_of(changes: dict[int, Change], count: int) -> tuple[list[str], dict[str, Any] | None]:
    """Returns the rows of both agents, as a Case has them, and the info of b's first end."""
    env: Any = game_of(changes)
    env.reset(0)
    rows, info = np.full((count, 2), "", object), None
    for time in range(count):
        step = env.step(np.zeros(2, np.int64))
        resets = np.zeros(2, bool) if step.resets is None else step.resets
        for column in (0, 1):
            row = "-" if resets[column] else f"{step.reward[column]:g}"
            if not resets[column] and step.episode_end[column]:
                row += "C" if step.truncated[column] else "T"
                assert step.terminated[column] != step.truncated[column]
            assert not resets[column] or (step.terminated[column] and not step.reward[column])
            rows[time, column] = row + ("/" if env.began[0] else "")
        if info is None and 1 in env.final_info:
            info = env.final_info[1]
        cut = np.flatnonzero(step.truncated)
        assert (step.final_observation is None) == (not len(cut))
        if len(cut):
            assert step.final_observation.tolist() == [[time + 1]] * len(cut), "of its own episode"
    return [" ".join(column) for column in rows.T], info


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_rows_of_an_agent_are_its_episode(case: Case) -> None:
    rows, info = rows_of(case.changes, len(case.a.split()))
    assert rows == [case.a, case.b]
    assert case.b_info is None or info == case.b_info


REFUSED = [
    ("no observation", {2: does(obs=None)},
        "agent b of game 0 of Game, step 2: observation: expected float32 .*, got object"),
    ("none for b in reset", {0: does(obs=None)}, "agent b .* step 0: observation: expected float"),
    ("none as b joins", {0: does(agents="a"), 1: does(agents="ab", obs=None)},
        "agent b .* step 1: observation: expected float32"),
    ("cut without a last observation", {1: does(cuts=B, obs=None)},
        "agent b .* step 1: observation: expected float32"),
    ("no reward", {1: does(rewards=None)}, "agent b .* step 1: expected a finite reward, got None"),
    ("no end", {1: does(ends=None)}, "agent b .* step 1: step returned None, expected True or Fal"),
    ("no truncation", {1: does(cuts=None)}, "agent b .* step 1: step returned None, expected True"),
    ("a text as end", {1: does(ends={"b": "no"})}, "agent b .* step 1: step returned 'no', expect"),
    ("three values", {1: returns(lambda found: older(found)[:3])}, "game 0 of Game, step 1: step "
        "returned tuple of 3 values, expected "),
    ("nothing from step", {1: returns(lambda found: 0)}, "step 1: step returned int, expected "),
    ("another shape", {1: does(obs={"b": np.zeros(2, np.float32)})}, "agent b of game 0 of Game, "
        r"step 1: observation: expected float32 of shape \(1,\)"),
    ("a last one that is not finite", {1: does(cuts=ALL, obs={"b": np.full(1, np.nan)})},
        "agent b of game 0 of Game, step 1: expected finite float32"),
]  # fmt: skip


@pytest.mark.parametrize(("_", "changes", "message"), REFUSED, ids=[each[0] for each in REFUSED])
def test_what_a_game_leaves_open_is_refused(_: str, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(changes, 3)


class WithoutSeeds(Scripted):
    """A game without options, render, close and seeds."""

    def __init__(self) -> None:
        super().__init__({})

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


def test_a_game_needs_nothing_that_one_agent_does_not_need() -> None:
    env: Any = vec_env_of(WithoutSeeds, {}, 2, "Game")
    env.reset(1)
    with pytest.raises(UsageError, match="game 0 of Game takes no options: add a param"):
        env.set_options({"level": 1})
    assert env.render() is None
    env.close()


# --- games of turns


class Rounds:
    """Agents a, b and c take turns. The action 0 is not allowed, 2 ends the agent that takes it, 3
    ends all, and 4 cuts all.
    """

    possible_agents: ClassVar = ["a", "b", "c"]
    metadata: ClassVar = {"is_parallelizable": False}

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict({"action_mask": spaces.MultiBinary(5)})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def agent_iter(self) -> Any:
        raise AssertionError("not used")

    def reset(self, seed: int | None = None) -> None:
        self.agents, self.agent_selection = list(self.possible_agents), "a"
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations, self.rewards = dict(self.terminations), dict.fromkeys(self.agents, 0)

    def observe(self, agent: str) -> Any:
        return {"action_mask": np.array([0, 1, 1, 1, 1])}

    def step(self, action: int | None) -> None:
        name, names = self.agent_selection, self.possible_agents
        following = [*names[names.index(name) + 1 :], *names]
        self.rewards = dict.fromkeys(self.agents, 0)
        if action is None:
            self._remove(name)
        else:
            assert action, "0 is not allowed"
            self.rewards[name] = 1
            if action == 2:
                self._end(name)
                return
            flags = {3: self.terminations, 4: self.truncations}.get(action, {})
            flags.update(dict.fromkeys(flags, True))
        self.agent_selection = next((n for n in following if n in self.agents), name)

    def _end(self, name: str) -> None:
        self.terminations[name] = True  # it is selected once more, for step(None)

    def _remove(self, name: str) -> None:
        self.agents.remove(name)
        del self.terminations[name], self.truncations[name]


class Older(Rounds):
    """PettingZoo's older interface."""

    def reset(self, seed: int | None = None) -> None:
        super().reset()
        self.dones = self.terminations
        del self.terminations

    def step(self, action: int | None) -> None:
        self.terminations = self.dones
        super().step(action)
        del self.terminations


class Leaves(Rounds):
    """An agent that has ended leaves immediately, and with it what is said of it."""

    def _end(self, name: str) -> None:
        following = {"a": "b", "b": "c", "c": "a"}[name]
        self._remove(name)
        self.agent_selection = following


def masks_and_rewards(kind: type, actions: list[int], **kwargs: Any) -> list[Any]:
    """Plays the agent whose turn it is; returns who that is, rewards and ends of each turn."""
    env: Any = vec_env_of(kind, kwargs, 3, "Rounds")
    observation, found = env.reset(0), []
    for action in actions:
        masks = observation["action_mask"]
        plays = [
            n for n, mask in zip("abc", masks, strict=True) if mask.tolist() == [0, 1, 1, 1, 1]
        ]
        assert len(plays) == 1
        step = env.step(np.where(masks[:, 1], action, 0))
        ends = [n for n, end in zip("abc", step.episode_end, strict=True) if end]
        found.append((plays[0], step.reward.tolist(), "".join(ends), bool(env.began[0])))
        observation = step.observation
    return found


@pytest.mark.parametrize("kind", [Rounds, Older, Leaves])
def test_the_next_player_after_an_end_has_its_own_mask(kind: type) -> None:
    assert masks_and_rewards(kind, [1, 2, 1, 1, 1, 3, 1]) == [
        ("a", [1, 0, 0], "", False),
        ("b", [0, 1, 0], "b", False),
        ("c", [0, 0, 1], "", False),
        ("a", [1, 0, 0], "", False),
        ("c", [0, 0, 1], "", False),
        ("a", [1, 0, 0], "ac", True),
        ("a", [1, 0, 0], "", False),
    ]


def test_a_game_of_turns_that_keeps_all_ended_agents_is_over() -> None:
    assert masks_and_rewards(Rounds, [1, 4, 1]) == [
        ("a", [1, 0, 0], "", False),
        ("b", [0, 1, 0], "abc", True),
        ("a", [1, 0, 0], "", False),
    ]


class Unmasked(Rounds):
    def observe(self, agent: str) -> Any:
        return {"mask": np.ones(5)}


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Unmasked, r"agent a of game 0 of Rounds, step 0: observation: expected a dict with the k")],
)
def test_a_game_of_turns_that_cannot_go_on_is_refused(kind: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masks_and_rewards(kind, [1, 2, 1])
