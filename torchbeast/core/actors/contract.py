# SPDX-License-Identifier: Apache-2.0
"""The interface of actors: their inputs, outputs and modes, and how observations mask actions.

T is time, B is batch. Row t of the inputs is what the environments gave *after* `last_action[t]`;
row t of an actor-critic's outputs is the policy over the next action and the value of that moment.
Acting is the same forward with T = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from torchbeast.core.actors.distributions import ActionDistribution, Categorical, MultiCategorical
from torchbeast.core.base.computing import dtype_for, own_torch_settings
from torchbeast.core.base.nest import Nest, map_leaves
from torchbeast.core.base.specs import ActorSpec, Precision, RewardClipping
from torchbeast.core.envs.contract import MASK
from torchbeast.core.envs.spaces import ActionSpace, ArraySpec, ObservationSpace
from torchbeast.core.envs.tasks import has_tasks, tasks_in, without_task
from torchbeast.errors import RunError, UsageError


@dataclass(frozen=True)
class ActionMask:
    """Rules out masked actions of a policy with these numbers of choices.

    A dict observation whose entry `action_mask` is one array [n] masks actions: n is the number of
    a Discrete space's actions, or of a MultiDiscrete's choices, one after the other (sum of nvec).
    A nonzero entry allows a choice, 0 rules it out. A mask [k, m] has a row for each of k choices
    among m; [2, 2] is refused, because it may be one of joint actions.

    Masked logits are -inf, so that a masked action has the probability 0 exactly. Acting and
    learning call the same network with the same observation: both see the same masked policy.
    """

    counts: tuple[int, ...]
    num_dims: int = 1

    def masked(self, logits: Tensor, observation: Nest[Tensor]) -> Tensor:
        """Returns logits [..., n] with -inf where the observation's mask [..., n] is 0.

        A mask of zeros alone, as of an episode's last observation, rules out nothing here.
        """
        return logits.masked_fill(~self._effective(observation), -torch.inf)

    def num_allowed(self, observation: Nest[Tensor]) -> Tensor:
        """Returns the number [...] of actions that are not ruled out, of a Discrete space."""
        return self._effective(observation).sum(-1)

    def check(self, observation: Nest[Tensor]) -> None:
        """Raises RunError where a mask leaves no choice; waits for the device."""
        choices = torch.split(self._allowed(observation), list(self.counts), -1)
        if not bool(torch.stack([choice.any(-1).all() for choice in choices]).all()):
            raise RunError(
                f"the {MASK} of an environment forbids every action: allow at least one (1 allows "
                "an action, 0 forbids it), or end the episode"
            )

    def _effective(self, observation: Nest[Tensor]) -> Tensor:
        """Returns which choices are allowed, bool [..., n]: all of a part where none is."""
        parts = torch.split(self._allowed(observation), list(self.counts), -1)
        return torch.cat([part | ~part.any(-1, keepdim=True) for part in parts], -1)

    def _allowed(self, observation: Nest[Tensor]) -> Tensor:
        """Returns which actions are allowed, bool [..., n]."""
        assert has_mask(observation)
        return observation[MASK].flatten(-self.num_dims) != 0


def mask_for(space: ObservationSpace, actions: ActionDistribution) -> ActionMask | None:
    """Returns the mask of observations of this space, None where they have no entry `action_mask`.

    Raises UsageError where the mask does not fit the actions.
    """
    if not has_mask(space):
        return None
    if not isinstance(actions, Categorical | MultiCategorical):
        raise UsageError(
            f"an {MASK} in observations needs a Discrete or MultiDiscrete action space, got one "
            f"with a {type(actions).__name__} distribution: rename the entry, or drop it with "
            "observation_keys"
        )
    counts, spec = actions.nvec, space[MASK]
    shapes: list[tuple[int, ...]] = [(sum(counts),)]
    if len({*counts}) == 1 < len(counts) and counts != (2, 2):  # which may be a joint mask
        shapes.append((len(counts), counts[0]))
    if not isinstance(spec, ArraySpec) or spec.shape not in shapes:
        shape = spec.shape if isinstance(spec, ArraySpec) else "several arrays"
        others = " ".join(key for key in space if key != MASK)
        raise UsageError(
            f"an {MASK} in observations needs one entry per action, of the shape "
            f"{' or '.join(map(str, shapes))}, got {shape}: change the environment, and do not "
            f"stack frames, or leave the mask out with observation_keys {others}"
        )
    return ActionMask(counts, len(spec.shape))


def has_mask(observation: Any) -> TypeGuard[dict[str, Any]]:
    """Returns whether an observation, or its space, has an entry `action_mask`."""
    return isinstance(observation, dict) and MASK in observation


Mode = Literal["sample", "greedy", "explore", "ladder"]
"""The way an actor chooses actions.

sample: from the policy that is learnt, at random where that policy is.
greedy: the action that this policy rates highest, never at random.
explore: as the algorithm collects experience; the same as sample unless the actor says otherwise.
ladder: explore with another epsilon in each environment, as in Ape-X.
"""


class ModelInputs(NamedTuple):
    """The inputs of a model: T rows of B environments.

    Attributes:
        observation: Leaves [T, B, *shape] in the environment's dtype.
        reward: float32 [T, B], as the environment gave it.
        done: bool or uint8 [T, B]: the observation is the first of an episode.
        last_action: Leaves [T, B, ...], the actions before the observations.
    """

    observation: Nest[Tensor]
    reward: Tensor
    done: Tensor
    last_action: Nest[Tensor]


class ModelOutput(NamedTuple):
    """The outputs of an actor-critic: T rows of B environments.

    Attributes:
        policy_logits: float32 [T, B, num_params], the params of the actor's distribution.
        baseline: float32 [T, B], the values; [T, B, tasks] of a forward that gives one per task.
        core_state: Leaves [layers, B, hidden], the recurrent state for the next row; () when
            feed-forward.
    """

    policy_logits: Tensor
    baseline: Tensor
    core_state: Nest[Tensor]


class Acted(NamedTuple):
    """The results of acting on one row of B environments.

    Attributes:
        action: Leaves [1, B, ...].
        extras: The outputs of Actor.extra_specs by name, [1, B, ...].
        state: Leaves [layers, B, hidden], the recurrent state for the next row.
    """

    action: Nest[Tensor]
    extras: dict[str, Tensor]
    state: Nest[Tensor]


class Actor(nn.Module, ABC):
    """Base class of networks that choose actions, for one observation space and one action space.

    A row whose `done` is true starts an episode: before it the actor zeros the state of that
    column. An actor keeps nothing between calls: given the same weights, inputs and random numbers
    it returns the same, even while another thread calls it.

    Attributes:
        distribution: The distribution over the action space. make_model sets the space's own unless
            the actor has set one; every actor needs it for the action before the first one, its
            zero_action.
        compute_dtype: The dtype in which features may be computed. The program sets it before the
            actor trains or acts. Outputs and state are float32 in any case.
        reward_input: The form in which `transform_reward` gives rewards to the network. The program
            sets it too.
        env_index: int64 [B], the numbers of the environments whose rows `act` gets, for
            exploration that differs among them. The program sets it; None: unknown.
        separable: Whether each column's outputs depend on that column's inputs alone, so that
            several threads may compute gradients of slices of a batch's columns. An actor that
            normalises over the batch, or stores something in `self` while it computes, is not
            separable; only its author knows.
        checks_masks: Whether `act` refuses a mask that rules out all actions. The program sets it.
    """

    distribution: ActionDistribution
    compute_dtype: torch.dtype = torch.float32
    reward_input: RewardClipping = ActorSpec.reward_input
    env_index: Tensor | None = None
    separable: bool = False
    checks_masks: bool = True

    def act(self, inputs: ModelInputs, state: Nest[Tensor], mode: Mode = "sample") -> Acted:
        """Chooses an action for one row, without a graph.

        The results are inference tensors: copy them before you train on them. Random numbers come
        from torch's global generator.

        Args:
            inputs: One row, [1, B, ...].
            state: Leaves [layers, B, hidden] of the recurrent state; () when feed-forward.
            mode: "sample" from the policy, "greedy" for its best action, or "explore" as the
                algorithm collects experience.

        Raises:
            RunError: If a mask rules out all actions.

        Example:
            ```python
            acted = actor.act(inputs, actor.initial_state(batch_size=1), mode="greedy")
            ```
        """
        with own_torch_settings(), torch.inference_mode():
            mask = getattr(self, "action_mask", None)
            if self.checks_masks and mask is not None:
                mask.check(inputs.observation)
            return self.choose(inputs, state, mode)

    @abstractmethod
    def choose(self, inputs: ModelInputs, state: Nest[Tensor], mode: Mode) -> Acted:
        """Computes the result of `act`; each kind of actor defines it.

        Args:
            inputs: One row, [1, B, ...].
            state: Leaves [layers, B, hidden] of the recurrent state; () when feed-forward.
            mode: As in `act`.
        """

    @property
    @abstractmethod
    def extra_specs(self) -> dict[str, ArraySpec]:
        """Shape and dtype of every extra of Acted, for one step of one environment."""

    def feature_weights(self) -> Iterable[nn.Parameter]:
        """Returns the weights that are used in compute_dtype, to choose it; by default all."""
        return self.parameters()

    def set_precision(self, precision: Precision, device: torch.device) -> None:
        """Sets compute_dtype for computing on a device.

        Args:
            precision: float32, bfloat16, or auto: see dtype_for, but float32 for networks from
                outside TorchBeast, because bfloat16 was only measured for its own.
            device: The device that will compute.
        """
        is_own = type(self).__module__.startswith("torchbeast.")
        self.compute_dtype = dtype_for(precision, device, self.feature_weights() if is_own else ())

    def initial_state(self, batch_size: int) -> Nest[Tensor]:
        """Returns the initial state, leaves [layers, batch_size, hidden]; () when feed-forward."""
        return ()

    def transform_reward(self, reward: Tensor) -> Tensor:
        """Returns rewards as inputs of a network, of the same shape: clipped to [-1, 1] for
        "abs_one", as in the original's networks; for "none" sign(r) log(1 + |r|), which keeps their
        order and stays below 20 for rewards of hundreds of millions.
        """
        if self.reward_input == "abs_one":
            return reward.clamp(-1.0, 1.0)
        return reward.sign() * reward.abs().log1p()

    def observe(self, observation: Nest[Tensor]) -> None:
        """Counts a batch in the running statistics of observations, if the model has any.

        The learner calls it once for each batch, before it learns from it, and nobody else does.
        Statistics belong in buffers: they are published and saved with the weights, and are as
        before when an update fails. Leaves [T, B, *shape].
        """


class ActorCritic(Actor):
    """A policy and a value function, with the extras policy_logits and baseline.

    Subclasses define `forward`, which neither samples nor keeps anything between calls. It need not
    know of action masks: calling the actor-critic, as acting and training do, rules out masked
    actions.

    Attributes:
        action_mask: How observations mask actions, set by make_model; None if they do not.
        recordable: Whether acting on a GPU may record `forward` as a CUDA graph, which is then
            replayed and runs three times as fast with small batches: it computes the same
            operations for all inputs of one shape, and reads no result on the host.

    Example:
        ```python
        class MyNet(ActorCritic):
            def __init__(self, observation_space, action_space, use_lstm):
                super().__init__()
                self.body = nn.Linear(math.prod(observation_space.shape), 64)
                self.policy = nn.Linear(64, distribution_for(action_space).num_params)
                self.baseline = nn.Linear(64, 1)

            def forward(self, inputs, core_state):
                x = torch.relu(self.body(inputs.observation.float().flatten(2)))
                return ModelOutput(self.policy(x), self.baseline(x).squeeze(-1), core_state)
        ```
    """

    action_mask: ActionMask | None = None
    recordable: bool = False

    def __call__(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> ModelOutput:
        """Returns the outputs of forward: the values of the rows' own tasks, and logits of -inf for
        masked actions. forward does not see the number of the task.

        Args:
            inputs: Rows [T, B, ...].
            core_state: Leaves [layers, B, hidden] before the first row; () when feed-forward.
        """
        observation = inputs.observation
        seen = inputs._replace(observation=without_task(observation))
        output: ModelOutput = super().__call__(seen, core_state)
        if output.baseline.dim() > inputs.reward.dim() and has_tasks(observation):
            tasks = tasks_in(observation).long().unsqueeze(-1)
            tasks = tasks.clamp(0, output.baseline.shape[-1] - 1)
            output = output._replace(baseline=output.baseline.gather(-1, tasks).squeeze(-1))
        if self.action_mask is None:
            return output
        logits = self.action_mask.masked(output.policy_logits, observation)
        return output._replace(policy_logits=logits)

    @abstractmethod
    def forward(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> ModelOutput:
        """Returns policies and values of all rows, and the state after the last one.

        Args:
            inputs: Rows [T, B, ...].
            core_state: Leaves [layers, B, hidden] before the first row; () when feed-forward.
        """

    def choose(self, inputs: ModelInputs, state: Nest[Tensor], mode: Mode) -> Acted:
        """Samples the policy, or takes its most likely action.

        Args:
            inputs: One row, [1, B, ...].
            state: Leaves [layers, B, hidden] of the recurrent state; () when feed-forward.
            mode: "greedy" for the most likely action; otherwise actions are sampled.
        """
        logits, baseline, state = self(inputs, state)
        actions = self.distribution
        action = actions.mode(logits) if mode == "greedy" else actions.sample(logits)
        return Acted(action, {"policy_logits": logits, "baseline": baseline}, state)

    @property
    def extra_specs(self) -> dict[str, ArraySpec]:
        """The extras policy_logits [num_params] and baseline []."""
        n = self.distribution.num_params
        return {"policy_logits": ArraySpec((n,), "float32"), "baseline": ArraySpec((), "float32")}


def _value_heads(actor: Actor) -> list[nn.Linear]:
    layers = (getattr(module, "baseline", None) for module in actor.modules())
    return [layer for layer in layers if isinstance(layer, nn.Linear)]


def repeat_value_head(actor: Actor, num_tasks: int) -> None:
    """Gives every task its own copy of the layer `baseline`, if the network has one. A recurrent
    Q-network keeps one, because that layer is a part of the value of every action.
    """
    has_heads = num_tasks > 1 and "policy_logits" in actor.extra_specs
    for head in _value_heads(actor) if has_heads else ():
        for name, parameter in list(head.named_parameters()):
            repeated = parameter.detach().repeat(num_tasks, *[1] * (parameter.dim() - 1))
            setattr(head, name, nn.Parameter(repeated))
        head.out_features = num_tasks


def value_head(actor: Actor) -> nn.Linear:
    """Returns the layer `baseline` that gives an actor-critic's values; raises UsageError if there
    is none.
    """
    heads = _value_heads(actor)
    if len(heads) != 1 or heads[0].bias is None:
        raise UsageError(
            f"popart rescales the last layer of the values, but {type(actor).__name__} has no "
            "attribute `baseline` that is an nn.Linear with a bias: give that name to the layer, "
            "or remove popart"
        )
    return heads[0]


def zeros_of(specs: Any, *leading: int) -> Any:
    """Returns a nest of specs with zeros [*leading, *shape] of its dtype in place of each."""

    def zeros(spec: ArraySpec) -> Tensor:
        return torch.zeros((*leading, *spec.shape), dtype=getattr(torch, spec.dtype))

    return map_leaves(zeros, specs)


def specs_of_extras(actor: Actor, names: Sequence[str]) -> dict[str, ArraySpec]:
    """Returns the specs of these extras; raises UsageError when the actor lacks one."""
    specs = actor.extra_specs
    if missing := [name for name in names if name not in specs]:
        raise UsageError(
            f"{type(actor).__name__} returns {', '.join(specs) or 'nothing'} in addition to "
            f"actions, but the algorithm needs {', '.join(missing)}: use another model"
        )
    return {name: specs[name] for name in names}


class Agent(NamedTuple):
    """A network that acts and is trained, and what it was made for.

    Attributes:
        model: The network.
        spec: Describes the network: "auto" is resolved, reads_values is True only if the space
            declares values.
        observation_space: The observation space as the policy sees it, with frames stacked.
        frame_stack: Number of frames in a stack.
        single_frame_space: The observation space as the environment sends it, before frames are
            stacked.
        action_space: The action space.
    """

    model: Actor
    spec: ActorSpec
    observation_space: ObservationSpace = ()
    frame_stack: int = 1
    single_frame_space: ObservationSpace = ()
    action_space: ActionSpace = ()
