# SPDX-License-Identifier: Apache-2.0
"""Trained agents of the zoo load by name and reach their scores."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo_agents
from drawn import CASES, Drawn, agent_of
from drawn import save as save_run

from torchbeast import load_agent, monobeast, zoo
from torchbeast.core.actors.contract import Agent
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.evaluation import play as play_module
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.episodes import Episodes

SHIPPED = {name: record.agent for name, record in zoo.records().items() if record.agent}
# What tests/requirements.txt does not install.
PACKAGES = {"box2d": "Box2D", "mujoco": "mujoco", "minigrid": "minigrid", "agents": "pettingzoo"}
FEWEST, MOST = 3, 16  # episodes


def reaches_its_score(name: str) -> bool:
    """Plays an agent, and returns whether its mean return is within 4 standard errors of its score.

    It plays as many episodes as make that half of the score, in the range above. One percent is for
    scores without a spread, on machines that round differently.
    """
    agent = SHIPPED[name]
    score, spread = agent["score"], agent["spread"]
    wanted = (8 * spread / max(abs(score), 1e-6)) ** 2
    num_episodes = math.ceil(min(max(wanted, FEWEST), MOST))
    mean = statistics.fmean(zoo_agents.episodes(name, num_episodes).returns)
    tolerance = 4 * spread / math.sqrt(num_episodes) + 0.01 * abs(score)
    return abs(mean - score) <= tolerance


@pytest.mark.parametrize("name", SHIPPED)
def test_an_agent_reaches_its_recorded_score(name: str) -> None:
    if package := PACKAGES.get(zoo.PRESETS[name].family):
        pytest.importorskip(package)
    assert reaches_its_score(name)


def without_statistics(checkpoint: dict[str, Any]) -> None:
    """Makes the network get observations as they are."""
    weights = checkpoint["model_state_dict"]
    weights["scale.mean"].fill_(0)
    weights["scale.variance"].fill_(1)


def weak(checkpoint: dict[str, Any]) -> None:
    """Divides the actions by 4."""
    actions = checkpoint["action_space"]
    for bound in ("low", "high"):
        actions[bound] = [value / 4 for value in actions[bound]]


@pytest.mark.parametrize(
    ("name", "fault"), [("cartpole-ppo", without_statistics), ("pendulum-sac", weak)]
)
def test_an_agent_with_wrong_statistics_or_actions_does_not_reach_its_score(
    name: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoints.load(zoo.agent_path(name), needed=())
    fault(saved)
    monkeypatch.setattr(zoo, "AGENTS", tmp_path)
    checkpoints.save(tmp_path / f"{name}.pt", saved)
    assert not reaches_its_score(name)


def test_every_agent_has_a_record_and_all_are_small() -> None:
    files = list(zoo.AGENTS.glob("*.pt"))
    assert {file.stem for file in files} == {*SHIPPED} <= {*zoo.PRESETS}
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) <= zoo_agents.MOST_BYTES and sum(sizes) <= 10_000_000


def test_an_agent_is_filmed_by_its_name_in_a_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_step(env: Any, agent: Agent, num: int, seed: int, watch: Any, **_: Any) -> Episodes:
        watch(env.reset(seed))
        return Episodes([1.0], [1], [2])

    monkeypatch.setattr(play_module, "play", one_step)
    frame = np.zeros((32, 32, 3), np.uint8)  # CartPole's own needs pygame
    monkeypatch.setattr(SyncVecEnv, "render", lambda self: frame)
    words = ["--mode", "test_render", "--xpid", "zoo:cartpole-ppo", "--savedir", str(tmp_path)]
    assert monobeast.main(words) == 0
    said = capsys.readouterr().out
    assert f"CartPole-v1, {zoo.AGENTS / 'cartpole-ppo.pt'}, step" in said
    assert (tmp_path / "zoo:cartpole-ppo" / "video.mp4").stat().st_size > 0


def test_a_film_of_an_agent_needs_a_folder_that_can_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["--xpid", "zoo:cartpole-ppo", "--savedir", str(tmp_path / "file")]
    assert monobeast.main(["--mode", "test_render", *words]) == 2
    assert "use another savedir" in capsys.readouterr().err


def test_a_flag_that_contradicts_an_agent_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert monobeast.main(["--mode", "test", "--xpid", "zoo:cartpole-ppo", "--algo", "sac"]) == 2
    assert "--algo must be ppo, as in the run" in capsys.readouterr().err


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the agents, which is empty."""
    monkeypatch.setattr(zoo, "AGENTS", tmp_path / "agents")
    return tmp_path / "agents"


def trained(folder: Path, case: str) -> Path:
    """Returns the folder of a run."""
    flags = {"env": "CartPole-v1", "seed": 101, "savedir": "/home/ann", "xpid": "try-7"}
    saved = save_run(folder / "model.tar", agent_of(CASES[case]), **flags)
    training = {key: saved["model_state_dict"] for key in checkpoints.KEYS if key not in saved}
    checkpoints.save(folder / "model.tar", {**saved, **training, "stats": {"step": 5}})
    return folder


@pytest.mark.parametrize("case", ["mlp", "small", "sac"])
def test_a_saved_agent_chooses_the_actions_of_its_run(
    case: str, tmp_path: Path, agents: Path
) -> None:
    run = trained(tmp_path, case)
    path = zoo_agents.save(run, "cartpole-ppo")
    seen = Drawn(CASES[case], 50).reset(0)
    before, after = (load_agent(each).act(seen) for each in (run, "zoo:cartpole-ppo"))
    assert np.isclose(before, after, atol=1e-2).mean() > 0.95 and len(np.unique(before)) > 1
    assert path.parent == agents


def test_a_saved_agent_knows_its_task_but_not_where_it_was_trained(
    tmp_path: Path, agents: Path
) -> None:
    path = zoo_agents.save(trained(tmp_path, "mlp"), "cartpole-ppo")
    saved, data = checkpoints.load(path, needed=()), path.read_bytes()
    assert saved["flags"]["env"] == "CartPole-v1" and saved["flags"]["seed"] == 101
    assert "optimizer_state_dict" not in saved
    assert b"CartPole" in data and b"/home/ann" not in data and b"try-7" not in data
    weights = saved["model_state_dict"]
    assert weights["scale.mean"].dtype == torch.float64
    assert weights["fc.weight"].dtype == torch.float16


def test_an_agent_that_is_too_large_is_not_saved(
    tmp_path: Path, agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo_agents, "MOST_BYTES", 1_000)
    with pytest.raises(ValueError, match=r"the agent has [\d,]+ bytes, expected at most 1,000"):
        zoo_agents.save(trained(tmp_path, "mlp"), "cartpole-ppo")
    assert not agents.exists()
