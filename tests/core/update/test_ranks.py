# SPDX-License-Identifier: Apache-2.0
"""Several learners take the steps that one takes from all of their batches."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from learners import impala, ppo
from off_policy import LinearActor, Toy, ToyConfig, random_transitions
from torch import Tensor

from torchbeast.core.actors.contract import ModelInputs
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.config import StepConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.core.update.ranks import added_in_order

T, ACTIONS, TIMEOUT_S = 5, 3, 30.0
Make = Callable[..., Rollout]


class Means(IMPALA):
    """Terms are means over the steps."""

    reduction = "mean"


class Halves(IMPALA):
    """Learns from each half of a batch, one after the other."""

    def minibatches(self, batch: Rollout) -> Iterable[Rollout]:
        return batch.split(-(-batch.batch_size // 2))


class ThreadRanks:
    """Learners in threads of one process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._given: list[Any] = [None] * size

    def rank(self, number: int) -> Any:
        outer = self

        class OneRank:
            def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
                outer._given[number] = message
                outer._barrier.wait()
                found = list(outer._given)
                outer._barrier.wait()
                return found

            def add(self, vector: Tensor) -> Tensor:
                outer._given[number] = vector.clone()
                outer._barrier.wait()
                total = added_in_order(outer._given)
                outer._barrier.wait()
                return total

        return OneRank()


def mlp(has_statistics: bool = False) -> MLPNet:
    bound = math.inf if has_statistics else 1.0
    return MLPNet(ArraySpec((4,), "float32", -bound, bound), Discrete(ACTIONS), False)


def together(learners: Sequence[OptimiserStep[Any]], batches: Sequence[Any]) -> list[Any]:
    """Updates each learner by its batch, all at once; returns their metrics or errors."""
    found: list[Any] = [None] * len(learners)

    def learn(number: int) -> None:
        try:
            found[number] = learners[number].update(batches[number]).metrics
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=learn, args=(n,)) for n in range(len(learners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return found


def ranks_of(whole: OptimiserStep[Any], make: Callable[..., Any], count: int) -> list[Any]:
    """Returns learners with the weights of one learner, that take their steps together."""
    ranks = ThreadRanks(count)
    return [make(copy.deepcopy(whole.algo.actor), ranks=ranks.rank(n)) for n in range(count)]


def apart(batch: Rollout, bounds: Sequence[int]) -> list[Rollout]:
    """Returns parts of a batch, unequally many columns each."""
    ends = [0, *bounds, batch.batch_size]
    return [batch.columns(first, end) for first, end in pairwise(ends)]


def masked(batch: Rollout) -> Rollout:
    """Leaves out random steps, and all of the last column."""
    valid = torch.rand(batch.reward.shape) < 0.6
    valid[1, :-1], valid[:, -1] = True, False
    return dataclasses.replace(batch, valid=valid)


def state(step: OptimiserStep[Any]) -> dict[str, Tensor]:
    return {
        f"{kind}.{name}": tensor
        for kind, model in step.algo.models.items()
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", [IMPALA, Means], ids=["sum", "mean"])
@pytest.mark.parametrize(("is_masked", "popart"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("bounds", [[3], [1, 4]])
def test_ranks_of_unequal_batches_learn_as_one_does_from_all_of_them(
    make_rollout: Make, kind: type[IMPALA], is_masked: bool, popart: bool, bounds: list[int]
) -> None:
    def make(actor: Any, **settings: Any) -> OptimiserStep[Any]:
        settings |= {"learning_rate": 0.01, "total_steps": 1000, "popart": popart}
        return impala(actor, kind, **settings)

    whole = make(mlp(has_statistics=True))
    learners = ranks_of(whole, make, len(bounds) + 1)
    for _ in range(3):
        batch = make_rollout(T, 5, terminated=[(2, 1)], truncated=[(3, 4), (4, 0)])
        batch = masked(batch) if is_masked else batch
        expected = whole.update(batch).metrics
        metrics = together(learners, apart(batch, bounds))
        for found in metrics:
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for learner in learners:
        torch.testing.assert_close(state(learner), state(whole), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(state(learner), state(learners[0]), rtol=0, atol=0)
        assert learner.counters == whole.counters


def test_several_optimisers_and_target_networks_are_joined_too() -> None:
    def make(actor: Any, **settings: Any) -> OptimiserStep[Any]:
        algo = Toy(actor, ToyConfig(momentum=0.5))
        return OptimiserStep(algo, StepConfig(), total_steps=10**9, **settings)

    whole = make(LinearActor())
    learners = ranks_of(whole, make, 2)
    for _ in range(3):
        batch = random_transitions(6)
        parts = [batch.map(lambda leaf: leaf[:4]), batch.map(lambda leaf: leaf[4:])]
        expected = whole.update(batch).metrics["value"]
        assert [found["value"] for found in together(learners, parts)] == pytest.approx(
            [expected] * 2
        )
    for learner in learners:
        torch.testing.assert_close(state(learner), state(whole))


@pytest.mark.parametrize("kind", [Halves, Means])
def test_a_learner_that_applies_the_gradients_of_others_gets_the_bits_that_ranks_get(
    make_rollout: Make, kind: type[IMPALA]
) -> None:
    def make(actor: Any, **settings: Any) -> OptimiserStep[Any]:
        return impala(actor, kind, learning_rate=0.01, popart=True, **settings)

    centre = make(mlp(has_statistics=True))
    learners = ranks_of(centre, make, 3)
    for _ in range(3):
        batches = apart(make_rollout(T, 7, truncated=[(2, 1)]), [2, 4])
        metrics = centrally(centre, make, batches)
        assert together(learners, batches)[1] == pytest.approx(metrics, abs=0, rel=0)
    for learner in learners:
        torch.testing.assert_close(state(learner), state(centre), rtol=0, atol=0)
        assert learner.counters == centre.counters


def centrally(centre: OptimiserStep[Any], make: Any, batches: Sequence[Rollout]) -> Any:
    """Lets others compute the gradients, with the centre's weights, and the centre apply them."""
    workers = [make(copy.deepcopy(centre.algo.actor)) for _ in batches]
    pairs = list(zip(workers, batches, strict=True))
    centre.statistics.add([worker.statistics.observed(batch) for worker, batch in pairs])
    for worker in workers:
        load(worker, centre)
    begun = [worker.begin(batch) for worker, batch in pairs]
    metrics = []
    minibatches = zip(*(parts for parts, _ in begun), strict=True)
    for number, several in enumerate(minibatches):
        for worker in workers:
            load(worker, centre)
        found = [
            worker.contribution(part, number, 0 if number else batch.env_steps)
            for (worker, batch), part in zip(pairs, several, strict=True)
        ]
        metrics.append(centre.apply(found))
    rates = centre.count(sum(batch.env_steps for batch in batches))
    return {name: sum(f[name] for f in metrics) / len(metrics) for name in metrics[0]} | rates


def load(worker: OptimiserStep[Any], centre: OptimiserStep[Any]) -> None:
    for name, model in centre.algo.models.items():
        worker.algo.models[name].load_state_dict(model.state_dict())


class StopsAfterTwo(PPO):
    """Remembers the metrics by which it was decided to stop."""

    def stops_after(self, metrics: Any) -> bool:
        seen: list[float] = self.__dict__.setdefault("seen", [])
        seen.append(metrics["approx_kl"])
        return super().stops_after(metrics)


def test_all_ranks_stop_after_the_same_minibatch_by_the_divergence_of_all(
    make_rollout: Make,
) -> None:
    def make(actor: Any, **settings: Any) -> OptimiserStep[Any]:
        settings |= {"num_epochs": 20, "num_mini_batch": 1, "target_kl": 0.05}
        return ppo(actor, StopsAfterTwo, learning_rate=0.02, **settings)

    learners = ranks_of(make(mlp()), make, 2)
    batches = [on_policy(learners[0].algo.actor, make_rollout(T, n)) for n in (2, 6)]
    found = together(learners, batches)
    assert found[0]["approx_kl"] == found[1]["approx_kl"]
    seen = [learner.algo.seen for learner in learners]
    assert seen[0] == seen[1] and 1 < len(seen[0]) < 20
    assert seen[0][-1] > 0.05 and max(seen[0][:-1]) <= 0.05
    torch.testing.assert_close(state(learners[0]), state(learners[1]), rtol=0, atol=0)


def on_policy(actor: Any, batch: Rollout) -> Rollout:
    """Gives the batch the logits of the actor's own policy."""
    inputs = ModelInputs(batch.observation, batch.reward, batch.done, batch.action)
    with torch.no_grad():
        logits = actor(inputs, ()).policy_logits
    behind = torch.cat([logits[:1], logits[:-1]])
    return dataclasses.replace(batch, extras={"policy_logits": behind})


def test_a_bad_batch_of_one_rank_changes_the_weights_of_none(make_rollout: Make) -> None:
    whole = impala(mlp(has_statistics=True))
    learners = ranks_of(whole, impala, 2)
    good, bad = make_rollout(T, 2), make_rollout(T, 2)
    bad.reward[3, 1] = math.nan
    before = copy.deepcopy(state(whole))
    found = together(learners, [good, bad])
    assert [type(error) for error in found] == [NonFiniteError] * 2
    for learner in learners:
        torch.testing.assert_close(state(learner), before, rtol=0, atol=0)
        assert learner.counters.version == 0


class OnePerColumn(IMPALA):
    def minibatches(self, batch: Rollout) -> Iterable[Rollout]:
        return batch.split(1)


def test_unequal_numbers_of_minibatches_are_a_sentence_in_every_rank(make_rollout: Make) -> None:
    """The second update of one rank meets the third minibatch of the other's first."""

    def make(actor: Any, **settings: Any) -> OptimiserStep[Any]:
        return impala(actor, OnePerColumn, **settings)

    learners = ranks_of(make(mlp()), make, 2)
    errors: list[str] = []

    def learn(number: int) -> None:
        try:
            for _ in range(2):
                learners[number].update(make_rollout(T, 2 + number))
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=learn, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(errors) == 2 and "must yield the same number" in errors[0]
    assert "[0, 2]" in errors[0]


def test_ranks_that_freeze_different_parameters_are_refused_by_all(make_rollout: Make) -> None:
    learners = ranks_of(impala(mlp()), impala, 2)
    before = copy.deepcopy(state(learners[0]))
    learners[1].algo.actor.baseline.bias.requires_grad_(False)
    number = [name for name, _ in learners[0].algo.actor.named_parameters()].index("baseline.bias")
    errors = together(learners, [make_rollout(T, 2)] * 2)
    for learner, error in zip(learners, errors, strict=True):
        assert isinstance(error, ValueError)
        assert f"requires_grad of the optimisers' parameters number [{number}]" in str(error)
        torch.testing.assert_close(state(learner), before, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["observe", "prepare", "metrics", "losses"])
def test_only_a_single_learner_may_change_buffers_by_its_batch(
    make_rollout: Make, method: str
) -> None:
    def counts(algo: Any, batch: Rollout) -> Any:
        algo.actor.seen += 1
        return getattr(IMPALA, method)(algo, batch)

    def make(actor: Any, **settings: Any) -> OptimiserStep[Any]:
        return impala(actor, type("Counts", (IMPALA,), {method: counts}), **settings)

    def as_gradient_worker(step: OptimiserStep[Any]) -> None:
        step.statistics.observed(batch)
        minibatches, _ = step.begin(batch)
        step.contribution(next(minibatches), 0, batch.env_steps)

    single, batch = make(mlp()), make_rollout(T, 2)
    single.algo.actor.register_buffer("seen", torch.zeros(()))
    learners = ranks_of(single, make, 2)
    for error in together(learners, [batch] * 2):
        assert isinstance(error, NotImplementedError)
        assert re.search(f"Counts.*{method}.* changes the buffer actor.seen", str(error))
    assert learners[0].algo.actor.seen == 0, "restored"
    with pytest.raises(NotImplementedError, match=f"Counts.*{method}.* changes"):
        as_gradient_worker(learners[0])
    single.update(batch)
    assert single.algo.actor.seen == 1


class Positions(MLPNet):
    """Keeps a table that grows with the longest rollout so far, like the rotary embeddings of many
    transformers.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, inputs: Any, state: Any) -> Any:
        rows = len(inputs.reward)
        if len(self.table) < rows:
            self.table = torch.linspace(1.0, 2.0, rows)
        output = super().forward(inputs, state)
        return output._replace(baseline=output.baseline * self.table[:rows, None])


def test_several_learners_may_change_a_buffer_that_is_not_in_the_state_dict(
    make_rollout: Make,
) -> None:
    """Neither actors nor checkpoints get it. One that acting has made is an inference tensor."""
    space = ArraySpec((4,), "float32", -1.0, 1.0)
    whole = impala(Positions(space, Discrete(ACTIONS), False))
    learners, batch = ranks_of(whole, impala, 2), make_rollout(T, 2)
    for learner in learners:
        with torch.inference_mode():
            learner.algo.actor.table = torch.ones(1)
    for metrics in together(learners, [batch] * 2):
        assert isinstance(metrics, dict), metrics
    assert len(learners[0].algo.actor.table) > 1
    torch.testing.assert_close(*map(state, learners), rtol=0, atol=0)
