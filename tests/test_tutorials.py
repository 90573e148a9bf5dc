# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows is what happens: its Python code, and the commands of the tutorials
and the pages for newcomers.

The Python blocks of a page run in order and share their names, as in a notebook, with the page's
environment and with another one. A block that begins with a file's name, `# my_env.py`, is that
file, and a diff changes the file before it. A block that begins with the name of another library,
`# Stable-Baselines3`, is not run. To be fast, the numbers after `target_steps=` and `every_steps=`
are divided by 100.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.flags import BenchFlags
from gradient_running import rollout

from torchbeast import Learner, Scheme, VecEnv, export, make_env
from torchbeast.cli import flags
from torchbeast.cli.command_line import parse, parse_known
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.errors import UsageError
from torchbeast.keys import KeysFlags
from torchbeast.plot import PlotFlags
from torchbeast.status import StatusFlags
from torchbeast.sweep.config import SweepConfig

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to"
TROUBLESHOOTING = HOW_TO / "troubleshooting.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [*TUTORIALS, HOW_TO / "install.md", *sorted(HOW_TO.glob("migrate-*.md")), TROUBLESHOOTING]
LOAD = HOW_TO / "load-and-export.md"
OWN, OTHER = "CartPole-v1", "MountainCar-v0"
ZOO = "zoo:cartpole-ppo"  # plays nothing else
FLOAT64 = "Pendulum-v1"  # its rewards; and its actions are a Box
NEEDED = ("envpool", "pettingzoo", "ray")  # packages without which a page is skipped
MODULE = re.compile(r"# (my_\w+)\.py\n")
ANOTHER_LIBRARY = re.compile(r"# (Stable-Baselines3|Nappo|TorchBeast 2019)\n")
STEPS = re.compile(r"(?<=_steps=)[\d_]+")
PROGRAMS = {
    "bench": BenchFlags,
    "keys": KeysFlags,
    "monobeast": MonoBeastFlags,
    "plot": PlotFlags,
    "polybeast": flags.PolyBeastFlags,
    "polybeast_env": flags.PolyBeastEnvFlags,
    "polybeast_learner": flags.PolyBeastLearnerFlags,
    "raybeast": RayBeastFlags,
    "status": StatusFlags,
    "sweep": SweepConfig,
}


def blocks(page: Path, *languages: str) -> list[str]:
    """Returns the code of a page in these languages, in order."""
    fence = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(fence, page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def patched(code: str, diff: str) -> str:
    """Returns the code after a diff; a line of @@ begins a hunk."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code


def write_module(folder: Path, code: str) -> str:
    """Writes a module that the next import reads; returns its name."""
    name = MODULE.match(code)[1]
    (folder / f"{name}.py").write_text(code)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the modules of all tutorials."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    codes = [code for page in TUTORIALS for code in blocks(page, "python")]
    names = [write_module(tmp_path, code) for code in codes if MODULE.match(code)]
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)


def run_python(page: Path, env: str, folder: Path) -> None:
    """Runs the Python code of a page from top to bottom, with `env` in place of its own."""
    names: dict[str, object] = {}
    module = ""
    for code in blocks(page, "python", "diff"):
        code = code.replace(OWN, env).replace(ZOO, "logs/cartpole")
        if code.startswith(("-", "+", " ")):
            code = patched(module, code)
        if MODULE.match(code):
            module = code
            importlib.import_module(write_module(folder, code))
        elif not ANOTHER_LIBRARY.match(code):
            code = STEPS.sub(lambda number: str(int(number[0]) // 100), code)
            exec(compile(code, str(page), "exec"), names)


def cases() -> Iterator[Any]:
    """Yields the pages with Python code, each with its environment and with another one."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        code = "".join(blocks(page, "python", "diff"))
        if code and page != LOAD:
            yield pytest.param(page, OWN, id=page.name)
        if OWN in code and page != LOAD:
            yield pytest.param(page, OTHER, id=f"{page.name}-{OTHER}", marks=pytest.mark.long)


@pytest.mark.parametrize(("page", "env"), [*cases()])
def test_the_python_code_of_a_page_runs_from_top_to_bottom(
    page: Path, env: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "".join(blocks(page, "python"))
    for name in NEEDED:
        if re.search(rf"\b{name}\b", code):
            package = pytest.importorskip(name)
            monkeypatch.setattr(package, "init", lambda **_: None, raising=False)  # of a cluster
    run_python(page, env, folder)


@pytest.mark.long
@pytest.mark.parametrize("env", [OWN, FLOAT64])
def test_a_trained_agent_plays_the_same_episode_in_all_ways_of_the_page(
    env: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    envs, *_ = VecEnv.create_factory(env_fn=make_env, env_kwargs={"env": env})
    Learner(Scheme.preset("ppo", envs), 1, log_dir="logs/cartpole", seed=1).train()
    for file in ("policy.pt2", "policy.onnx"):
        export("logs/cartpole", file)
    capsys.readouterr()
    run_python(LOAD, env, folder)
    returns = [float(found) for found in re.findall("^return (.*)", capsys.readouterr().out, re.M)]
    assert returns == [pytest.approx(returns[0], rel=1e-3)] * 3


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_programs_take_the_commands_of_a_page(page: Path, folder: Path) -> None:
    for lines in blocks(page, "shell"):
        for line in lines.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            program = next((w for w in words if w.startswith("torchbeast.")), "").partition(".")[2]
            if program and not {"--help", "help"} & {*words}:
                args = words[words.index(f"torchbeast.{program}") + 1 :]
                parsing = parse_known if program == "sweep" else parse  # agents have more flags
                parsing(PROGRAMS[program], program, args)


@pytest.mark.parametrize("flag", ["--step_bonus", "--entropy_cost"])
def test_the_setting_of_a_tutorial_and_those_that_it_extends_are_checked(
    flag: str, folder: Path
) -> None:
    algo = ["--algo", "my_bonus:Bonus"]
    with pytest.raises(UsageError, match=f"{flag} must be at least 0, got -1"):
        parse(MonoBeastFlags, "monobeast", [*algo, flag, "-1"])
    config: Any = parse(MonoBeastFlags, "monobeast", [*algo, flag, "0.5"]).algorithm
    assert config == dataclasses.replace(type(config)(), **{flag[2:]: 0.5})


def test_the_bonus_of_a_tutorial_is_no_input_of_the_network(folder: Path) -> None:
    own: Any = importlib.import_module("my_bonus")
    net = MLPNet(ArraySpec((4,), "float32"), Discrete(3), False)
    algo = own.Bonus(net, own.BonusConfig(step_bonus=1.0, reward_clipping="none"))
    batch = rollout(seed=1)
    assert torch.equal(algo.prepare(batch).reward, batch.reward)
    rewards, _ = algo.rewards_and_discounts(batch, torch.zeros_like(batch.reward[1:]))
    assert torch.equal(rewards, batch.reward[1:] + 1.0)


def texts_of(code: str) -> Iterator[str]:
    """Yields the strings in Python code, with … in place of what an f-string inserts."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(value, "value", "") for value in node.values]
            yield "".join(part if isinstance(part, str) else "…" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_runs_of_the_page_about_several_agents_have_different_names() -> None:
    text = "".join(blocks(HOW_TO / "several-agents.md", "shell"))
    names = re.findall(r"--xpid (\S+)", text)
    assert len(names) == len({*names}) == 2


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    files = [*(ROOT / "torchbeast").rglob("*.py"), ROOT / "libtorchbeast" / "__init__.py"]
    known = "\n".join(text for file in files for text in texts_of(file.read_text("utf-8")))
    page = TROUBLESHOOTING.read_text("utf-8")
    quoted = re.findall(r"^ *```text\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    tables = re.findall(
        r"^\| (?:the )?(?:message|warning).*?(?=\n\n)", page, re.DOTALL | re.MULTILINE
    )
    quoted += [cell for table in tables for cell in re.findall(r"^\| `(.*?)` \|", table, re.M)]
    assert len(quoted) > 25
    known = known.replace("--", "")  # components name fields; the command line adds the dashes
    parts = [part.strip() for text in quoted for part in text.split("…")]
    unknown = {part for part in parts if part.replace("--", "") not in known}
    assert not unknown
