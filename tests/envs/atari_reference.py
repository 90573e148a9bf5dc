# SPDX-License-Identifier: Apache-2.0
"""The original's Atari preprocessing as Python wrappers over ALEInterface, to compare ours with.

Inner to outer: begin the game; frame skip 4 with the maximum of the last two frames; a lost life
ends the episode, and the next begins with one no-op; FIRE and action 2 after every reset; gray
84x84 by area; stack of 4. Two things are parameters, in which ours differ (docs/how-to/atari.md):
how a game begins, and whether the maximum is taken over colours, as in the original, or over gray.
"""

from __future__ import annotations

from collections.abc import Callable

import ale_py
import cv2
import numpy as np
from ale_py import roms

FIRE = 1


class Game:
    """Emulates one frame for each action; screens are uint8 [210, 160, 3] or [210, 160]."""

    def __init__(
        self,
        rom: str,
        *,
        gray: bool = False,
        seed: int = 0,
        sticky: float = 0.0,
        every_action: bool = False,
    ) -> None:
        self.gray = gray
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", sticky)
        self.ale.setInt("random_seed", seed)
        self.ale.loadROM(roms.get_rom_path(rom))
        minimal, legal = self.ale.getMinimalActionSet(), self.ale.getLegalActionSet()
        self.actions = legal if every_action else minimal
        self.can_fire = ale_py.Action.FIRE in self.actions

    def act(self, action: int) -> float:
        return float(self.ale.act(self.actions[action]))

    def screen(self) -> np.ndarray:
        screen: np.ndarray = self.ale.getScreenRGB()
        return to_gray(screen) if self.gray else screen


def begin_like_ale(noops: int) -> Callable[[Game], None]:
    """Presses FIRE for one of the no-op frames, as ALE's vector environment does."""

    def begin(game: Game) -> None:
        if game.can_fire:
            game.act(FIRE)
        for _ in range(noops - game.can_fire):
            game.act(0)

    return begin


class MaxAndSkip:
    def __init__(self, game: Game, begin: Callable[[Game], None], skip: int = 4) -> None:
        self.game, self.begin, self.skip = game, begin, skip
        self.frames = [np.zeros_like(game.screen())] * 2

    def reset(self) -> np.ndarray:
        self.game.ale.reset_game()
        self.begin(self.game)
        return self.game.screen()

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        reward = 0.0
        for left in reversed(range(self.skip)):
            reward += self.game.act(action)
            if left < 2:
                self.frames[1 - left] = self.game.screen()
            if self.game.ale.game_over():
                break
        seen = np.maximum(*self.frames) if self.skip > 1 else self.frames[1]
        return seen, reward, self.game.ale.game_over()


class EpisodicLife:
    def __init__(self, env: MaxAndSkip) -> None:
        self.env, self.game = env, env.game
        self.game_is_over, self.lives = True, 0

    def reset(self) -> np.ndarray:
        screen = self.env.reset() if self.game_is_over else self.env.step(0)[0]
        self.lives = self.game.ale.lives()
        self.game_is_over = False
        return screen

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        screen, reward, self.game_is_over = self.env.step(action)
        lives = self.game.ale.lives()
        life_lost = 0 < lives < self.lives
        self.lives = lives
        return screen, reward, self.game_is_over or life_lost


class FireReset:
    def __init__(self, env: EpisodicLife) -> None:
        self.env, self.step = env, env.step

    def reset(self) -> np.ndarray:
        screen = self.env.reset()
        for action in (FIRE, 2):
            screen, _, done = self.env.step(action)
            if done:
                screen = self.env.reset()
        return screen


class WarpAndStack:
    """The outermost wrapper: observations are uint8 [4, 84, 84], oldest frame first."""

    def __init__(self, env: EpisodicLife | FireReset) -> None:
        self.env = env

    def reset(self) -> np.ndarray:
        self.stack = np.stack([warp(self.env.reset())] * 4)
        return self.stack

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        screen, reward, done = self.env.step(action)
        self.stack = np.concatenate([self.stack[1:], warp(screen)[None]])
        return self.stack, reward, done


def to_gray(screen: np.ndarray) -> np.ndarray:
    gray: np.ndarray = cv2.cvtColor(screen, cv2.COLOR_RGB2GRAY)
    return gray


def warp(screen: np.ndarray) -> np.ndarray:
    """Converts a screen to gray uint8 [84, 84]."""
    gray = screen if screen.ndim == 2 else to_gray(screen)
    warped: np.ndarray = cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)
    return warped
