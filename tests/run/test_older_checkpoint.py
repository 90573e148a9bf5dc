# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as MonoBeast wrote it when IMPALA was the only algorithm loads, and its run goes on.

Such a file counts env steps and versions alone, and its flags know nothing of --algo, --env_kwargs
and --model_kwargs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner_run import LEARNERS, EndingSource, train_from
from test_training import B, T, rollout

from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import by_present_name
from torchbeast.run import checkpoint as checkpoints

STEPS, VERSION, TOTAL = 400, 40, 1000
RATE, ALPHA, EPSILON = 0.002, 0.98, 0.1
# The network mlp for four numbers without bounds and three actions.
PARAMETERS = {
    "torso.linear.weight": (128, 4),
    "torso.linear.bias": (128,),
    "fc.weight": (128, 128),
    "fc.bias": (128,),
    "policy.weight": (3, 132),
    "policy.bias": (3,),
    "baseline.weight": (1, 132),
    "baseline.bias": (1,),
}
FLAGS = {
    "mode": "train",
    "xpid": "run",
    "savedir": "~/logs/torchbeast",
    "disable_checkpoint": False,
    "checkpoint_interval": 600.0,
    "num_episodes": 10,
    "sampled": False,
    "random_start": None,
    "preset": None,
    "seed": 7,
    "model": "auto",
    "use_lstm": False,
    "total_steps": TOTAL,
    "batch_size": 8,
    "unroll_length": 80,
    "discounting": 0.99,
    "reward_scale": 1.0,
    "reward_clipping": "none",
    "entropy_cost": 0.01,
    "baseline_cost": 0.5,
    "learning_rate": RATE,
    "warmup_steps": 0,
    "alpha": ALPHA,
    "momentum": 0.0,
    "epsilon": EPSILON,
    "grad_norm_clipping": 40.0,
    "max_lag": None,
    "num_learner_threads": None,
    "torch_threads": 1,
    "precision": "float32",
    "megabytes_at_once": None,
    "compile": False,
    "disable_cuda": True,
    "write_profiler_trace": False,
    "env": "CartPole-v1",
    "observation_keys": [],
    "sticky_actions": None,
    "frame_skip": None,
    "full_action_space": False,
    "num_actors": 4,
    "num_processes": None,
    "num_buffers": None,
    "fixed_lag": None,
}


def older_checkpoint() -> dict[str, Any]:
    """Every key that the file had."""
    weights = {name: torch.randn(shape) / 10 for name, shape in PARAMETERS.items()}
    statistics = {
        "scale.mean": torch.tensor([0.1, -0.2, 0.0, 1.0], dtype=torch.float64),
        "scale.variance": torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64),
        "scale.count": torch.tensor(STEPS),
    }
    averages = [{"square_avg": torch.rand(shape)} for shape in PARAMETERS.values()]
    group = {"params": list(range(8)), "lr": 0.6 * RATE, "alpha": ALPHA, "eps": EPSILON}
    return {
        "model_state_dict": statistics | weights,
        "optimizer_state_dict": {
            "state": dict(enumerate(averages)),
            "param_groups": [group | {"momentum": 0.0}],
        },
        "scheduler_state_dict": {"steps": STEPS, "version": VERSION},
        "stats": {"step": STEPS, "episodes": 2, "returns": [9.0, 11.0], "lengths": [9, 11]},
        "rng": {"torch": torch.get_rng_state()},
        "format": 1,
        "flags": FLAGS,
        "model": "mlp",
        "reward_input": "none",
        "reads_values": True,
    }


@pytest.fixture
def older(tmp_path: Path) -> dict[str, Any]:
    """The checkpoint of `run`."""
    (tmp_path / "run").mkdir()
    saved = older_checkpoint()
    torch.save(saved, tmp_path / "run" / "model.tar")
    return saved


def resume(
    savedir: Path, batches: int, resumed: Path | None = None, words: Sequence[str] = ()
) -> dict[str, Any]:
    """Continues `run` as its name alone does, or from another checkpoint; the new checkpoint."""
    made = [rollout() for _ in range(batches)]
    flags = parse(MonoBeastFlags, "monobeast", ["--savedir", str(savedir), "--xpid", "run", *words])
    train_from(lambda: EndingSource(made), flags, "CartPole-v1", resumed=resumed)
    return checkpoints.load(savedir / "run" / "model.tar")


def test_it_is_restored_with_its_settings(
    older: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copy(tmp_path / "run" / "model.tar", tmp_path)  # its own is saved already
    now = resume(tmp_path, batches=0, resumed=Path(other))
    said = capsys.readouterr().out
    assert f"Resuming {tmp_path / 'run'} at step {STEPS}." in said
    assert "recorded" not in said, "nothing was changed"
    for key in ("model_state_dict", "optimizer_state_dict", "rng"):
        torch.testing.assert_close(now[key], older[key], rtol=0, atol=0)
    assert now["stats"] == older["stats"]
    assert {name: now[name] for name in ("format", "model", "reward_input", "reads_values")} == {
        name: older[name] for name in ("format", "model", "reward_input", "reads_values")
    }
    changed = {"savedir": str(tmp_path), "observation_keys": []}
    new = {"algo": "impala", "env_kwargs": {}, "model_kwargs": {}}
    new |= {"episodes_for_avg": 100, "suppress_logs": False}
    new |= {"replay_size": 0, "replay_ratio": 1.0, "learn_start": 0, "checkpoint_replay": False}
    new |= {"replay_service": None, "keep_checkpoints": 3, "device": "auto"}
    new |= {"mask_actions": False, "info_keywords": (), "wandb_project": None, "metrics_port": None}
    new |= {"wandb_upload": False}
    new |= {"normalise_returns": False, "follow": False, "checkpoint": "model.tar"}
    new |= {"n_step": 1, "priority_exponent": 0.0, "priority_beta": 0.4, "hindsight_share": 0.0}
    new |= {"selfplay": None, "pause_at": None, "log_interval": 0.0, "disable_tensorboard": False}
    new |= {"learning_rate_schedule": "linear", "final_learning_rate": 0.0}
    new |= {"entropy_cost_schedule": "constant", "final_entropy_cost": 0.0}
    new |= {"restart_schedules": True, "shared_body": None}
    new |= {"eval_every": None, "eval_episodes": 10, "callback": ()}
    new |= {"optimiser": "rmsprop", "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}
    assert now["flags"] == by_present_name(FLAGS | changed) | new


def test_its_next_update_continues_weights_averages_and_schedule(
    older: dict[str, Any], tmp_path: Path
) -> None:
    """RMSprop by its definition, with the learning rate at the step that the file records."""
    now = resume(tmp_path, batches=1)
    gradients = dict(LEARNERS[-1].agent.model.named_parameters())
    rate = RATE * (1 - STEPS / TOTAL)
    for number, name in enumerate(PARAMETERS):
        gradient = gradients[name].grad
        assert gradient is not None and gradient.any(), name
        before = older["optimizer_state_dict"]["state"][number]["square_avg"]
        average = ALPHA * before + (1 - ALPHA) * gradient.square()
        weights = older["model_state_dict"][name] - rate * gradient / (average.sqrt() + EPSILON)
        torch.testing.assert_close(now["model_state_dict"][name], weights)
        saved = now["optimizer_state_dict"]["state"][number]["square_avg"]
        torch.testing.assert_close(saved, average)
    assert now["model_state_dict"]["scale.count"] == STEPS + T * B
    (row,) = read_logs(tmp_path / "run")
    assert row["learning_rate"] == pytest.approx(rate)
    rates = now["optimizer_state_dict"]["param_groups"][0]["lr"]
    assert rates == pytest.approx(RATE * (1 - (STEPS + T * B) / TOTAL))


def test_another_rate_that_is_typed_applies_from_its_step_on(
    older: dict[str, Any], tmp_path: Path
) -> None:
    resume(tmp_path, 2, words=["--learning_rate", "0.0006"])
    rates = [row["learning_rate"] for row in read_logs(tmp_path / "run")]
    assert rates == pytest.approx([0.0006, 0.0006 * (1 - T * B / (TOTAL - STEPS))])


def test_its_counters_continue_and_the_new_ones_follow_from_them(
    older: dict[str, Any], tmp_path: Path
) -> None:
    """Every step was learnt from once, with one optimiser step for a batch."""
    now = resume(tmp_path, batches=2)
    assert now["scheduler_state_dict"] == {
        "steps": STEPS + 2 * T * B,
        "learnt_steps": STEPS + 2 * T * B,
        "optimiser_steps": VERSION + 2,
        "version": VERSION + 2,
        "schedule_starts": {},
    }
    assert LEARNERS[-1].weights.version == VERSION + 2
    assert now["stats"] == {
        "step": STEPS + 2 * T * B,
        "episodes": 4,
        "returns": [9.0, 11.0, 7.0, 7.0],
        "lengths": [9, 11, 4, 4],
    }
