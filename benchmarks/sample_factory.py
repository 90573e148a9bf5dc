# SPDX-License-Identifier: Apache-2.0
"""Compares PolyBeast with Sample Factory's APPO on Pong: same network, same settings of the game.

Sample Factory 2.1.1 needs older NumPy and Gymnasium than TorchBeast, so it gets a virtual
environment of its own, made at the first call and reused afterwards. Both programs learn from each
sample once, with the same number of games and of steps per update. The figure compared is agent
steps learnt from per second, four frames each. The runs are interleaved.

Sample Factory's counter moves by whole batches (1,280 steps with the defaults, three seconds on two
cores). A window of 25 s holds six to eight of them and is wrong by up to one batch, an eighth to a
sixth; a window of 70 s by about a twentieth. Do not compare shorter ones.

python benchmarks/sample_factory.py [--nets small three] [--seconds 70] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import venv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from figures import Figures, interleaved, print_table, write_json
from progress import Program, Reading, add_flags, measured, torchbeast

from torchbeast.fleets.system import available_cores

HERE = Path(__file__).resolve().parent
# Newer versions of OpenCV require NumPy 2.
REQUIREMENTS = (
    "sample-factory==2.1.1",
    "numpy<2",
    "gymnasium<1",
    "ale-py==0.10.2",
    "opencv-python<4.12",
    "setuptools<81",
)
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
UNROLL_LENGTH = 20
FRAMES_PER_STEP = 4
# "[2026-01-01 10:00:00,123][04242] Fps is (10 sec: 5.0, ...). Total num frames: 81920. ..."
REPORT = re.compile(r"\[(\d{4}-\S+ [\d:]+,\d+)\].*Total num frames: (\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Net:
    """One network, by its name in each program."""

    torchbeast: str  # --model
    architecture: str  # --encoder_conv_architecture
    linear: int  # units of the layer after the convolutions


NETS = {
    "small": Net(torchbeast="small_net:SmallConvNet", architecture="convnet_impala", linear=256),
    "three": Net(torchbeast="small_net:ThreeConvNet", architecture="convnet_atari", linear=512),
}


def main() -> None:
    # Without this, a killed benchmark would leave the measured program running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments = _arguments()
    python = _sample_factory_python(arguments.venv, arguments.torch)
    figures: dict[str, Figures] = {}
    for name in arguments.nets:
        runs = {
            f"Sample Factory, {name}": functools.partial(
                measured, _sample_factory(python, arguments, NETS[name]), arguments
            ),
            f"PolyBeast, {name}": functools.partial(
                measured, _polybeast(arguments, NETS[name]), arguments
            ),
        }
        figures[name] = interleaved(runs, arguments.repeats)
        print_table(figures[name], "agent steps/s")
        write_json(arguments.json, arguments, steps_per_second=figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--num_envs", type=int, default=64, help="also the rollouts per update")
    parser.add_argument("--cores", type=int, default=available_cores())
    # Sample Factory's counter moves by whole batches, so a run has to last 70 seconds at least.
    add_flags(parser, warm_up=20.0, seconds=70.0, patience=300.0)
    parser.add_argument("--venv", type=Path, default=CACHE / "torchbeast" / "sample_factory")
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="pip requirement of torch in that environment"
    )
    return parser.parse_args()


def _polybeast(arguments: argparse.Namespace, net: Net) -> Program:
    rollouts = {"num_envs": arguments.num_envs, "batch_size": arguments.num_envs}
    return torchbeast("polybeast", net.torchbeast, {**rollouts, "unroll_length": UNROLL_LENGTH})


def _sample_factory(python: Path, arguments: argparse.Namespace, net: Net) -> Program:
    """Returns Sample Factory with the fastest settings found: double-buffered workers, one per
    core.
    """
    flags = {
        "algo": "APPO",
        "env": "atari_pong",
        "device": "cpu",
        "num_workers": arguments.cores,
        "num_envs_per_worker": arguments.num_envs // arguments.cores,
        "worker_num_splits": 2,
        "rollout": UNROLL_LENGTH,
        "recurrence": 1,
        "batch_size": arguments.num_envs * UNROLL_LENGTH,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "async_rl": True,
        "serial_mode": False,
        "encoder_conv_architecture": net.architecture,
        "encoder_conv_mlp_layers": net.linear,
        "normalize_input": False,
        "normalize_returns": False,
        "train_for_env_steps": 10**9,
        "experiment": "run",
    }
    return Program(
        name="Sample Factory",
        # -I keeps this file's folder off the search path: this file has the name of their package.
        command=[str(python), "-I", str(HERE / "sample_factory_atari.py")]
        + [f"--{key}={value}" for key, value in flags.items()],
        environment={},
        output_flags=lambda folder: [f"--train_dir={folder}"],
        readings=_sample_factory_readings,
    )


def _sample_factory_readings(folder: Path) -> list[Reading]:
    """Reads the log; its frames are the samples learnt from, times the frame skip."""
    output = (folder / "output.txt").read_text(errors="replace")
    return [
        (_seconds(when), int(frames) / FRAMES_PER_STEP) for when, frames in REPORT.findall(output)
    ]


def _seconds(when: str) -> float:
    return datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def _sample_factory_python(folder: Path, torch: str) -> Path:
    """Returns the Python of Sample Factory's virtual environment, making it if necessary.

    The file `installed` records that the environment is complete.
    """
    folder = folder.expanduser().absolute()
    python, installed = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join((torch, *REQUIREMENTS)) + "\n"
    if not installed.exists() or installed.read_text() != wanted:
        print(f"Installing Sample Factory in {folder}", file=sys.stderr)
        if not python.exists():
            venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "-q", "install", torch, *REQUIREMENTS], check=True)
        installed.write_text(wanted)
    return python


if __name__ == "__main__":
    main()
