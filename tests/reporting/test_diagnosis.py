# SPDX-License-Identifier: Apache-2.0
"""Time shares and their diagnosis: the limiting stage, and advice with flags of the program."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest

from torchbeast.cli.command_line import flatten
from torchbeast.cli.flags import PolyBeastEnvFlags, PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.collect.contract import ACTOR_STAGES, CollectionPlan, LostStream
from torchbeast.fleets.system import CoreTime
from torchbeast.reporting.diagnosis import (
    LEARNER_STAGES,
    UNKNOWN,
    Reading,
    RecentShares,
    Shares,
    alive,
    diagnose,
    diagnose_lost_streams,
    shares,
    spent,
)
from torchbeast.run.training import LearnerClock
from torchbeast.servers.config import FleetConfig

FLAGS = {
    "monobeast": MonoBeastFlags(),
    "polybeast": PolyBeastFlags(),
    "polybeast_learner": PolyBeastLearnerFlags(),
    "raybeast": RayBeastFlags(),
}

STARVED = Shares(environment=0.8, inference=0.15, queueing=0.05, learning=0.38, waiting=0.62)
SLOW_POLICY = Shares(environment=0.3, inference=0.6, queueing=0.1, learning=0.4, waiting=0.6)
SLOW_LEARNER = Shares(environment=0.2, inference=0.1, queueing=0.7, learning=0.95, waiting=0.05)
NO_ROOM = Shares(environment=0.3, inference=0.2, queueing=0.5, learning=0.3, waiting=0.7)
EVEN = Shares(environment=0.6, inference=0.3, queueing=0.1, learning=0.9, waiting=0.1)
ALL = {"starved": STARVED, "policy": SLOW_POLICY, "learner": SLOW_LEARNER, "room": NO_ROOM}


class Served(CollectionPlan):
    """As PolyBeast collects; its own plan needs the compiled libtorchbeast."""

    acts_where_it_steps = False
    of_processes = FleetConfig.of_processes


def setup(program: str = "monobeast", **changes: Any) -> CollectionPlan:
    """Returns how a program collects, by default with 2 processes on 2 cores."""
    processes = None if program == "polybeast_learner" else 2
    usual = {"num_envs": 8, "fixed_lag": None, "cores": 2, "processes": processes}
    kind = Served if program.startswith("polybeast") else CollectionPlan
    return kind(**(usual | changes))


def said(found: Shares, to: CollectionPlan) -> str:
    diagnosis = diagnose(found, to)
    assert diagnosis is not None
    return diagnosis.sentence


def reading(time: float, *seconds: float) -> Reading:
    return Reading(time, dict(zip(ACTOR_STAGES + LEARNER_STAGES, seconds, strict=True)))


def test_shares_are_those_of_the_time_between_two_readings() -> None:
    found = shares(reading(10, 106, 53, 1, 7, 13), reading(0, 100, 50, 0, 1, 9))
    assert found[:5] == pytest.approx((0.6, 0.3, 0.1, 0.6, 0.4))


def test_a_learner_that_waits_for_files_is_not_the_bottleneck() -> None:
    before, now = reading(0, 0, 0, 0, 0, 0), reading(10, 1, 1, 8, 6, 4)
    found = shares(now._replace(writing=3.0), before)
    assert found.writing == pytest.approx(0.3)
    assert said(found, setup()).startswith(
        "the learner waits for files 30 % of its time: use a faster"
    )


def test_a_stage_without_a_report_has_no_share() -> None:
    found = shares(Reading(10, {"environment": 2.0, "learning": 1.0}), Reading(0, {}))
    assert found[:6] == Shares(1.0, 0.0, 0.0, 1.0, 0.0)[:6]


def test_stages_without_any_time_have_unknown_shares() -> None:
    found = shares(reading(10, 5, 5, 5, 1, 1), reading(0, 5, 5, 5, 0, 0))
    assert all(math.isnan(share) for share in found[:3]) and found[3:6] == (0.5, 0.5, 0.0)
    assert diagnose(found, setup()) is None


def test_the_seconds_between_readings_can_be_added_up() -> None:
    readings = [reading(t, t * 1.0, t * 2.0, 0, t * t, 0) for t in range(5)]
    parts = [spent(now, before) for before, now in pairwise(readings)]
    total = spent(readings[-1], readings[0])
    assert total["learning"] == 16 and total["inference"] == 8
    assert {name: sum(part[name] for part in parts) for name in total} == total


def test_the_window_forgets_what_is_more_than_ten_seconds_ago() -> None:
    window = RecentShares()
    for second in range(20):
        window.add(reading(second, second, 0, 0, 0, second))  # environment only, until second 19
    for second in range(20, 29):
        found = window.add(reading(second, 19, second - 19, 0, second - 19, 19))
    assert found[:5] == pytest.approx((0.1, 0.9, 0.0, 0.9, 0.1))
    assert window.add(reading(29, 19, 10, 0, 10, 19))[:5] == (0.0, 1.0, 0.0, 1.0, 0.0)


def test_the_first_seconds_of_a_run_get_no_diagnosis() -> None:
    window = RecentShares()
    assert window.add(reading(0, 0, 0, 0, 0, 0)) == UNKNOWN
    assert window.add(reading(7, 1, 1, 1, 1, 1)) == UNKNOWN
    assert window.add(reading(8, 1, 1, 2, 1, 1))[:5] == (0.25, 0.25, 0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        (STARVED, "environment"),
        (SLOW_POLICY, "inference"),
        (SLOW_LEARNER, "learner"),
        (NO_ROOM, "room"),
        (EVEN, "none"),
    ],
)
def test_the_limiting_stage_is_found(found: Shares, limit: str) -> None:
    diagnosis = diagnose(found, setup())
    assert diagnosis is not None and diagnosis.limit == limit


def test_the_use_of_cores_is_that_of_the_time_between_two_readings() -> None:
    """It lasts ten seconds; the first quota is used more than the second, and than the cores."""
    before = reading(0, 0, 0, 0, 0, 0)._replace(cores=CoreTime(100.0, 7.0, (50.0, 1.0, 1.0)))
    now = reading(10, 1, 1, 1, 1, 1)._replace(cores=CoreTime(115.0, 9.0, (54.0, 10.0, 6.0)))
    assert shares(now, before)[6:] == pytest.approx((1.5, 1.7, 0.9))
    ended = now._replace(cores=now.cores._replace(delayed=0.0))  # a process that had waited
    assert shares(ended, before)[6:8] == pytest.approx((1.5, 1.5))


@pytest.mark.parametrize(
    ("own", "wanted", "used", "cores", "sentence"),
    [
        # they sleep, on idle cores, and on cores that other programs use
        (0.2, 0.25, 0.1, 2, "waiting 80 %: raise num_envs and num_workers; this run uses 0.2 of 2"),
        (0.2, 0.25, 1.0, 2, "waiting 80 %: raise num_envs and num_workers; this run uses 0.2 of 2"),
        # they compute: on all cores, on two of four, and for half of the time
        (1.9, 2.9, 0.97, 2, "busy 80 %: 2 of 2 cores are busy; only more cores or a faster"),
        (2.1, 2.1, 0.55, 4, "busy 80 %: raise num_workers; 2 of 4 cores step environments"),
        (1.0, 1.1, 0.5, 2, "busy 80 %: raise num_envs and num_workers; this run uses 1.0 of 2"),
        # they compute, but other programs use most of the cores
        (
            0.8,
            2.6,
            1.0,
            2,
            "other programs are using 1.2 of the 2 cores (learner idle 62 %, workers",
        ),
        # the cores are in use by this run's four processes, and a little by others
        (3.6, 4.0, 0.98, 4, "busy 80 %: 4 of 4 cores are busy; only more cores or a faster"),
    ],
)
def test_waiting_in_steps_is_told_from_computing(
    own: float, wanted: float, used: float, cores: int, sentence: str
) -> None:
    found = STARVED._replace(own=own, wanted=wanted, used=used)
    assert sentence in said(found, setup(cores=cores))


def test_other_programs_are_named_before_the_stages_that_they_slow_down() -> None:
    for found in (SLOW_LEARNER, NO_ROOM, STARVED._replace(writing=0.5)):
        slowed = found._replace(own=0.8, wanted=2.6, used=1.0)
        assert said(slowed, setup()).startswith("other programs are using 1.2 of the 2 cores")


def test_environments_of_other_programs_are_not_taken_for_the_run_s_own() -> None:
    """A learner alone does not know whether they wait; their cores may be on other machines."""
    here, elsewhere = setup("polybeast_learner"), setup("polybeast_learner", is_local=False)
    idle, full = (
        STARVED._replace(own=0.2, wanted=0.2, used=0.3),
        STARVED._replace(own=0.2, used=1.0),
    )
    raised = "environments busy 80 %: raise num_envs and num_servers in polybeast_env"
    assert said(idle, here).endswith(raised)
    assert "2 of 2 cores are busy" in said(full, here)
    for found in (idle, full, STARVED):
        assert said(found, elsewhere).endswith(f"{raised}, or add hosts if their cores are in use")


def test_on_a_cluster_the_cores_of_its_workers_count_not_those_of_the_learner() -> None:
    cluster = setup("raybeast", processes=16, cores=16, is_local=False)
    waiting = STARVED._replace(own=0.9, wanted=0.9, used=1.0)
    assert "raise num_envs and num_workers; this run uses 0.9 of 16" in said(waiting, cluster)
    assert "16 of 16 cores are busy" in said(STARVED._replace(own=15.0, used=0.1), cluster)


def test_a_large_policy_lag_is_part_of_the_diagnosis() -> None:
    usual = diagnose(STARVED, setup(), 16.0)
    old = diagnose(STARVED, setup(), 30.2)
    assert usual is not None and old is not None and usual == diagnose(STARVED, setup())
    advice = "raise batch_size, because the policy lag is 30 versions"
    assert old == (usual.limit, f"{usual.sentence}; {advice}")
    chosen = setup(fixed_lag=8)
    assert diagnose(STARVED, chosen, 30.2) == diagnose(STARVED, chosen)


def test_more_processes_are_only_recommended_if_cores_are_free() -> None:
    assert said(STARVED, setup(cores=4)) == (
        "learner idle 62 %, environments busy 80 %: "
        "raise num_workers; 2 of 4 cores step environments"
    )
    full = said(STARVED, setup(cores=2))
    assert "2 of 2 cores are busy; only more cores or a faster environment would help" in full


def test_with_one_environment_per_process_more_environments_are_recommended() -> None:
    assert "raise num_envs;" in said(STARVED, setup(cores=4, num_envs=2))


def test_recommendations_name_the_setting_of_the_program() -> None:
    assert "num_workers" in said(STARVED, setup("monobeast", cores=4))
    assert "num_servers" in said(STARVED, setup("polybeast", cores=4))
    assert "num_servers in polybeast_env" in said(STARVED, setup("polybeast_learner"))
    assert "num_inference_threads" in said(SLOW_POLICY, setup("polybeast"))
    assert "num_buffers" in said(NO_ROOM, setup("monobeast"))
    assert "max_learner_queue_size" in said(NO_ROOM, setup("polybeast"))
    assert "num_workers" in said(STARVED, setup("raybeast", cores=4))
    assert "num_buffers" in said(NO_ROOM, setup("raybeast"))


def test_a_learner_alone_names_the_program_that_makes_environments() -> None:
    """Its own num_envs is the number that it expects to find."""
    sentence = said(SLOW_POLICY, setup("polybeast_learner"))
    assert "raise num_envs in polybeast_env for larger batches" in sentence
    assert sentence.count("num_envs") == 1
    assert "raise num_envs for" in said(SLOW_POLICY, setup("polybeast"))


def test_a_limiting_learner_gets_recommendations_for_learning() -> None:
    assert said(SLOW_LEARNER, setup()) == (
        "the learner is the bottleneck (workers blocked 70 %): larger updates (batch_size, "
        "unroll_length) or a smaller model help"
    )


def test_a_fixed_lag_is_the_only_reason_that_is_named_when_workers_wait_for_it() -> None:
    """In the middle of a run and at its end, when the shares differ."""
    for found in (NO_ROOM, SLOW_LEARNER):
        sentence = said(found, setup(fixed_lag=1))
        assert "with fixed_lag 1" in sentence and "smaller model" not in sentence


def test_every_diagnosis_fits_a_line_and_names_only_flags_of_the_program() -> None:
    checked = 0
    for program, flags in FLAGS.items():
        own = {f"--{name}" for name in flatten(flags)}
        if program == "polybeast_learner":
            own |= {f"--{name}" for name in flatten(PolyBeastEnvFlags())}
        waiting = STARVED._replace(own=0.1, wanted=0.1, used=0.1)
        taken = STARVED._replace(own=0.9, wanted=64.0, used=0.99)
        for found in [*ALL.values(), EVEN, waiting, taken]:
            for cores in (1, 2, 64):
                sentence = said(found, setup(program, cores=cores))
                assert len(sentence) <= 160 and "\n" not in sentence
                assert set(re.findall(r"--\w+", sentence)) <= own
                checked += 1
    assert checked == 84


def test_with_lost_streams_the_diagnosis_is_their_loss() -> None:
    assert diagnose_lost_streams([], live=4) is None
    one = diagnose_lost_streams([LostStream("unix:/a.1", 12.3)], live=3)
    assert one is not None and one.limit == "lost"
    assert one.sentence == ("Lost 1 of 4 streams (12 s ago): unix:/a.1; reconnecting")
    many = diagnose_lost_streams(
        [LostStream(f"unix:/a.{i // 2}", 10.0 + i) for i in range(10)], live=0
    )
    assert many is not None and many.sentence == (
        "Lost all 10 streams (the first one 19 s ago): unix:/a.0, unix:/a.1, unix:/a.2 and 2 more; "
        "reconnecting"
    )


def test_alive_counts_streams_or_actor_processes() -> None:
    assert alive({"learner_queue_size": 3, "live_streams": 2}) == ("streams", 2)
    assert alive({"learner_queue_size": 3, "live_workers": 5}) == ("workers", 5)


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_learning_and_waiting_add_up_to_wall_clock_time() -> None:
    time = Time()
    clock = LearnerClock(time)
    time.now = 4.0
    with clock.updates.running():
        time.now = 6.0
        assert clock.seconds() == {"learning": 2.0, "waiting": 4.0}, "one that is under way counts"
        time.now = 7.0
    time.now = 12.0
    assert clock.seconds() == {"learning": 3.0, "waiting": 9.0}


def test_no_reading_of_the_waiting_time_falls() -> None:
    times = iter([0.0, 1.0, 2.0, 2.5, 3.0, 3.1, 4.0])
    clock = LearnerClock(lambda: next(times))
    with clock.pauses.running():
        assert clock.seconds()["waiting"] <= clock.seconds()["waiting"]


def test_a_failed_update_counts_until_its_failure() -> None:
    time = Time()
    clock = LearnerClock(time)
    with pytest.raises(ArithmeticError), clock.updates.running():
        time.now = 1.0
        raise ArithmeticError
    time.now = 5.0
    assert clock.seconds() == {"learning": 1.0, "waiting": 4.0}
