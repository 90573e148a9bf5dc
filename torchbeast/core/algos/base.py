# SPDX-License-Identifier: Apache-2.0
"""The one optimiser step (backward, clip, step, schedule) and all that a checkpoint must hold.

An algorithm defines `losses`; everything else is here. An algorithm is used by one thread at a
time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActorCritic, Mode
from torchbeast.core.algos.pieces import Pieces
from torchbeast.core.losses import Reduction
from torchbeast.core.nest_py import map_leaves
from torchbeast.core.storages.rollout import Rollout


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite; the weights are as before the update."""


class Optimizer(Protocol):
    """Any of torch.optim, or another of its form."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""

    def step(self) -> Any:
        """Moves the parameters by their gradients."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state_dict."""


class LinearDecay:
    """A learning rate that goes linearly to 0 over total_steps, and stays there.

    Over the first warmup_steps it also grows linearly from 0.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> None:
        self._optimizer = optimizer
        self._total_steps = total_steps
        self._warmup_steps = warmup_steps
        self._initial = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps = 0
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Counts agent steps learnt and sets the optimiser's learning rates for the next update."""
        self.steps += steps
        remaining = max(0.0, 1.0 - self.steps / self._total_steps)
        warmth = min(1.0, self.steps / self._warmup_steps) if self._warmup_steps else 1.0
        for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True):
            group["lr"] = initial * remaining * warmth


class Algorithm(ABC):
    """Updates a model's weights in place.

    version: learner steps done, also over restarts; what a rollout's policy_version counts in.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Extras of acting that must travel in the rollouts."""
    mode: ClassVar[Mode] = "sample"
    """How sources act."""

    def __init__(
        self,
        model: ActorCritic,
        optimizer: Optimizer,
        *,
        total_steps: int,
        grad_norm_clipping: float,
        warmup_steps: int = 0,
        loss_reduction: Reduction = "sum",
        bytes_at_once: int | None = None,
        num_threads: int = 1,
    ) -> None:
        """loss_reduction: how `losses` joins steps. bytes_at_once, num_threads: of the pieces that
        a batch is learnt in; they change speed and last digits only.
        """
        self.model = model
        self.optimizer = optimizer
        self.schedule = LinearDecay(optimizer, total_steps, warmup_steps)
        self.version = 0
        self._grad_norm_clipping = grad_norm_clipping
        self._loss_reduction = loss_reduction
        self._pieces = Pieces(model, bytes_at_once, num_threads)

    @abstractmethod
    def losses(self, rollout: Rollout) -> dict[str, Tensor]:
        """The parts of the loss by name, with their costs; their sum is minimised.

        No column may depend on another, other than through the sum or mean over all steps.
        """

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learns from a batch; returns losses, grad_norm (before clipping), learning_rate, lags.

        NonFiniteError, before any weight is touched, when a loss or a gradient is NaN or infinite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        with self._observing(rollout):
            losses = self._pieces.backward(rollout, self._share_of(rollout))
            norm = gradient_norm(self.model.parameters())
            stats = _fetch({**losses, "grad_norm": norm, **self._lags(rollout)})
            self._check_finite(stats, list(losses))
        return stats | {"learning_rate": self._apply(stats["grad_norm"], rollout.num_steps)}

    @contextmanager
    def _observing(self, rollout: Rollout) -> Iterator[None]:
        """Running statistics count the batch, unless learning from it fails. Row 0 was counted
        with the rollout before. All pieces see the same statistics.
        """
        buffers = list(self.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        self.model.observe(map_leaves(lambda leaf: leaf[1:], rollout.observation))
        try:
            yield
        except BaseException:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            raise

    def _share_of(self, batch: Rollout) -> Callable[[Rollout], dict[str, Tensor]]:
        """The losses of a piece, as parts of those of the batch."""

        def losses(piece: Rollout) -> dict[str, Tensor]:
            parts = self.losses(piece)
            if self._loss_reduction == "sum":
                return parts
            share = piece.batch_size / batch.batch_size
            return {name: share * loss for name, loss in parts.items()}

        return losses

    def _apply(self, norm: float, num_steps: int) -> float:
        """Clips, steps and counts; returns the learning rate this was done with."""
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        clip_gradients(self.model.parameters(), norm, self._grad_norm_clipping)
        self.optimizer.step()
        self.version += 1
        self.schedule.advance(num_steps)
        return learning_rate

    def _lags(self, rollout: Rollout) -> dict[str, Tensor]:
        """How many learner steps the acting weights were behind, over the actions learnt from."""
        lags = self.version - rollout.policy_version[1:]
        return {"mean_lag": lags.float().mean(), "max_lag": lags.max()}

    def _check_finite(self, stats: dict[str, float], losses: list[str]) -> None:
        for name in losses:
            if not math.isfinite(stats[name]):
                raise NonFiniteError(self._failure(f"{name} is {stats[name]}"))
        if not math.isfinite(stats["grad_norm"]):
            name = _first_non_finite_gradient(self.model)
            raise NonFiniteError(self._failure(f"the gradient of {name} is not finite"))

    def _failure(self, what: str) -> str:
        return (
            f"{what} in learner step {self.version}; the weights are as before it. "
            "Look for NaN in the observations, or lower the learning rate"
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on. The tensors are the live ones: copy to keep."""
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": {"steps": self.schedule.steps, "version": self.version},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state_dict; ValueError, nothing changed, if it is another model's."""
        check_fits(self.model, state["model_state_dict"])
        counts = state["scheduler_state_dict"]
        if missing := {"steps", "version"} - set(counts):
            raise ValueError(
                f"the checkpoint's scheduler_state_dict lacks {', '.join(sorted(missing))}: it was "
                "written by another program and can be tested, but not resumed"
            )
        self.model.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.version, self.schedule.steps = int(counts["version"]), int(counts["steps"])
        self.schedule.advance(0)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients as one vector; a tensor, so that nothing waits for the device."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in _gradients(parameters)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, maximum: float) -> None:
    """Scales the gradients, whose norm is given, so that their norm is at most the maximum."""
    if norm > maximum:
        for gradient in _gradients(parameters):
            gradient.mul_(maximum / norm)


def check_fits(model: nn.Module, state: dict[str, Tensor]) -> None:
    """ValueError naming the first parameter in which a model_state_dict and the model differ."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in state.items()}
    for name in [*shapes, *found]:
        if shapes.get(name) != found.get(name):
            raise ValueError(
                f"the checkpoint is another model's: {name} is {found.get(name, 'missing')} in the "
                f"checkpoint and {shapes.get(name, 'missing')} in the model; "
                "use the model and environment it was trained with"
            )


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _fetch(stats: dict[str, Tensor]) -> dict[str, float]:
    """All figures as floats in one transfer from the device."""
    values = torch.stack([value.detach().float() for value in stats.values()])
    return dict(zip(stats, values.tolist(), strict=True))


def _first_non_finite_gradient(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return "the whole model (its norm overflows)"
