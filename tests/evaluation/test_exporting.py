# SPDX-License-Identifier: Apache-2.0
"""An exported file chooses the actions of the agent, with nothing of TorchBeast."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from drawn import CASES, Drawn, agent_of, of, save
from later import later

from torchbeast import export, load_agent
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.base.nest import flatten, map_leaves2
from torchbeast.errors import RunError, UsageError
from torchbeast.evaluation import exporting

Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def host_of(path: Path, num_envs: int) -> tuple[dict[str, np.ndarray], Run]:
    """Returns the first inputs of a file, zeros, and a function that runs it; no TorchBeast."""
    if path.suffix == ".onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(path)
        dtypes = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(bool)": "bool"}

        def zeros(given: Any) -> np.ndarray:
            dtype = dtypes.get(given.type, given.type[len("tensor(") : -1])
            return np.zeros((num_envs, *given.shape[1:]), dtype)

        names = [output.name for output in session.get_outputs()]
        first = {given.name: zeros(given) for given in session.get_inputs()}
        return first, lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
    program = torch.export.load(path)
    (example,), _ = program.example_inputs
    policy = program.module()
    first = {name: np.repeat(0 * leaf[:1].numpy(), num_envs, 0) for name, leaf in example.items()}

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = policy({name: torch.from_numpy(array) for name, array in inputs.items()})
        return {name: output.numpy() for name, output in outputs.items()}

    return first, run


def exported(tmp_path: Path, name: str, file: str, **options: Any) -> Path:
    """Exports an agent of a case; skips the test without the packages of ONNX."""
    if file.endswith(".onnx"):
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    save(tmp_path / "model.tar", agent_of(CASES[name]), env=of(name))
    return export(tmp_path, tmp_path / file, **options)


FILES = [
    *(("nest", "p.pt2"), ("sac", "p.pt2"), ("masked-integers", "p.onnx")),
    later("masked", "p.pt2"),
    later("gtrxl", "p.pt2"),
    later("gtrxl", "p.onnx"),
    later("shallow", "p.pt2"),
    later("stacked-box", "p.onnx"),
]


@pytest.mark.parametrize(("name", "file"), FILES)
def test_an_exported_file_takes_the_actions_of_training(
    name: str, file: str, tmp_path: Path
) -> None:
    case, num_envs = CASES[name], 3
    env = Drawn(case, num_envs)
    loop = EnvLoop(env, agent_of(case).model, seed=0)
    inputs, run = host_of(exported(tmp_path, name, file), num_envs)
    for _ in range(20):
        loop.act("greedy")
        loop.step()
        observation, reward, done = env.sent[-2]
        seen = exporting.named("observation", observation)
        outputs = run({**inputs, **seen, "reward": reward, "done": done})
        action = [array for name, array in outputs.items() if name.split(".")[0] == "action"]
        wanted = map_leaves2(_in_bounds, case.actions, env.executed[-1])
        for taken, expected in zip(action, flatten(wanted), strict=True):
            np.testing.assert_allclose(taken, expected, 0, 1e-4)
            assert taken.dtype == expected.dtype
        for extra, value in loop.acted.extras.items():
            np.testing.assert_allclose(outputs[extra], value[0], 1e-5, 1e-4)  # they reach 40
        after = {name: array for name, array in outputs.items() if name.startswith("next_")}
        inputs.update({name.removeprefix("next_"): array for name, array in after.items()})


def _in_bounds(space: Any, action: np.ndarray) -> np.ndarray:
    if not hasattr(space, "low"):
        return action
    bounds = (np.reshape(np.float32(bound), space.shape) for bound in (space.low, space.high))
    return np.clip(action, *bounds).astype(space.dtype)


def test_features_of_a_torch_file_may_have_bfloat16(tmp_path: Path) -> None:
    inputs, run = host_of(exported(tmp_path, "mlp", "p.pt2", precision="bfloat16"), 1)
    (said,) = run({**inputs, "done": np.ones(1, bool)})["policy_logits"]
    agent = load_agent(tmp_path)
    agent.act(np.zeros(4))
    assert agent.acted is not None
    exact = agent.acted.extras["policy_logits"].flatten().numpy()
    assert 0 < np.abs(said - exact).max() < 0.1


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("p.tar", {}, r"expected the name of a \.pt2 or \.onnx file"),
        ("p.onnx", {"precision": "bfloat16"}, "do not support precision bfloat16"),
        ("no/folder/p.pt2", {}, "use another path"),
    ],
)
def test_a_file_that_cannot_be_made_is_refused(
    file: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        exported(tmp_path, "start", file, **options)


@pytest.mark.parametrize(
    ("env", "kind", "found"),
    [
        ("drawn:broken", RunError, "drawn:broken cannot be made:.*no display"),
        ("no_such_module:make", UsageError, "there is no module no_such_module"),
    ],
)
def test_an_environment_that_does_not_work_here_may_be_replaced(
    env: str, kind: type[Exception], found: str, tmp_path: Path
) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["start"]), env=env)
    with pytest.raises(kind, match=rf"(?s){found}.*\nThe environment .*: --env my_module:make_env"):
        export(tmp_path, tmp_path / "p.pt2")
    assert export(tmp_path, tmp_path / "p.pt2", env=of("start")).exists()


class OfFive(Drawn):
    """A game whose five agents count as environments."""

    num_agents = 5

    def reset(self, seed: int) -> Any:
        assert self.num_envs == 5
        return super().reset(seed)


def make_game_of_five(num_envs: int) -> OfFive:
    return OfFive(CASES["start"], num_envs)


def test_the_agent_of_a_game_is_compared_in_a_whole_game(tmp_path: Path) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["start"]), env=f"{__name__}:make_game_of_five")
    assert export(tmp_path, tmp_path / "p.pt2").exists()


def test_the_log_of_torch_is_as_it_was_after_an_export_that_failed() -> None:
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    with pytest.raises(RunError), exporting.quiet():
        assert logger.level == logging.ERROR != before
        raise RunError
    assert logger.level == before


def test_missing_packages_of_onnx_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    save(tmp_path / "model.tar", agent_of(CASES["start"]), env=of("start"))
    with pytest.raises(UsageError, match=r"ONNX needs onnxruntime: pip install 'torchbeast\[onnx"):
        export(tmp_path, tmp_path / "p.onnx")


def test_a_file_that_does_not_choose_the_agents_actions_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_swapped", lambda leaf: 0 * leaf.transpose(0, 1))
    with pytest.raises(
        RunError, match="the exported file differs from the agent: at step 1 its action"
    ):
        exported(tmp_path, "box", "p.pt2")
    assert not (tmp_path / "p.pt2").exists()


def test_the_function_keeps_its_name_where_the_program_was_imported() -> None:
    done = warm.run("import torchbeast.export; torchbeast.export('run', 'p.tar')")
    assert "UsageError: p.tar: expected the name of a .pt2 or .onnx file" in done.stderr


def test_the_program_says_on_what_the_file_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["start"]), env=of("start"))
    file = tmp_path / "policy.pt2"
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path), str(file)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torchbeast.export", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0 and file.exists()
    assert (
        capsys.readouterr().out == f"Verified: {file} matches the agent over 32 environment steps\n"
    )


def test_an_export_does_not_depend_on_the_dtype_of_its_caller(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        file = exported(tmp_path, "start", "p.pt2")
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    inputs, _ = host_of(file, 1)
    assert inputs["reward"].dtype == np.float32
