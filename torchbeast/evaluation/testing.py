# SPDX-License-Identifier: Apache-2.0
"""`--mode test` and `test_render` of every program: evaluates one checkpoint of a run.

Checkpoints of the original TorchBeast can be evaluated too.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import EXIT_DONE
from torchbeast.evaluation.config import EvaluationConfig
from torchbeast.evaluation.play import Episodes, report
from torchbeast.evaluation.player import ENV_OF_THE_RUN, NEEDED, Player
from torchbeast.learning import kept_checkpoints
from torchbeast.processes.child_process import show_output


def test(
    folder: Path,
    config: EvaluationConfig,
    asked: EnvSpec = ENV_OF_THE_RUN,
    *,
    seed: int | None = None,
    film: bool = False,
) -> int:
    """Plays whole episodes, prints their returns, and returns the exit code.

    folder: the folder of the run whose checkpoint is evaluated.
    asked: the environment; its name and options default to those of training.
    film: also write a video into the folder.
    """
    newest = folder / config.checkpoint
    found = kept_checkpoints.load_newest(newest, NEEDED)
    saved, path = found.checkpoint, found.path
    if said := kept_checkpoints.sentence(found, newest):
        print(f"Warning: {said}.", file=sys.stderr, flush=True)
    show_output()
    with closing(Player(saved, path, config, asked, seed=seed, film=film)) as player:
        print(f"{player.where}, {path}, {_step(saved)}{player.how}", flush=True)
        episodes = _filmed(player, folder / "video.mp4") if film else player.play()
        print(report(episodes))
    return EXIT_DONE


def _step(saved: dict[str, Any]) -> str:
    step = saved.get("stats", {}).get("step")
    return "" if step is None else f"step {int(step):,}, "


def _filmed(player: Player, video: Path) -> Episodes:
    from torchbeast.evaluation.video import VideoWriter, picture  # OpenCV, which nothing else needs

    with VideoWriter(video) as writer:

        def film(observation: Any) -> None:
            writer.write(picture(player.env.render(), observation))

        episodes = player.play(film)
    print(f"The video is {writer.path}")
    return episodes
