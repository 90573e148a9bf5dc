# SPDX-License-Identifier: Apache-2.0
"""An agent on a node of a cluster, with a process whose end the test decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_child import FakeChild
from sweeping import agent, log

from torchbeast.reporting.run_folder import RunFolder
from torchbeast.sweep import trial
from torchbeast.sweep.trial import Requests, Trial


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, fakes: None) -> None:
    monkeypatch.setattr(trial, "_EVERY_S", 0.0)


@pytest.fixture
def requests(tmp_path: Path) -> Requests:
    found = Requests(tmp_path)
    found.create()
    return found


def begun(folder: Path) -> Trial:
    found = Trial(agent(folder, seed="1"), 1)
    found.step()
    return found


FOLDER = "seed=1"


def test_a_trial_reports_what_its_agent_logs_and_no_return_before_there_is_one(
    tmp_path: Path, requests: Requests
) -> None:
    found = begun(tmp_path)
    assert "mean_episode_return" not in found.step()
    log(tmp_path / FOLDER, [(10, 2, 0.5)])
    result = found.step()
    assert (result["step"], result["episodes"], result["mean_episode_return"]) == (10, 2, 0.5)
    assert "done" not in result


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"ended": True}, ""),
        ({"ended": True, "why": "no such file"}, "no such file"),
        (None, "process 1 was killed by SIGKILL"),
    ],
)
def test_a_trial_ends_with_its_agent_and_says_how(
    tmp_path: Path, requests: Requests, report: dict[str, Any] | None, why: str
) -> None:
    found = begun(tmp_path)
    FakeChild.made[0].finish(report)
    result = found.step()
    assert result["done"] and result["agent_ended"] and result["why"] == why


def test_an_agent_that_is_asked_to_end_is_told_once_and_no_other_is(
    tmp_path: Path, requests: Requests
) -> None:
    found = begun(tmp_path)
    requests.add("seed=12")
    assert "done" not in found.step() and not FakeChild.made[0].asked
    requests.add(FOLDER)
    assert found.step()["done"]
    found.end()
    assert FakeChild.made[0].times_asked == 1


def test_an_agent_that_was_asked_before_it_began_does_not_begin(
    tmp_path: Path, requests: Requests
) -> None:
    requests.add(FOLDER)
    assert Trial(agent(tmp_path, seed="1"), 1).step()["done"] and not FakeChild.made


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    result = Trial(agent(tmp_path / "elsewhere", seed="1"), 1).step()
    assert result["done"] and not FakeChild.made
    assert "does not see the sweep's folder" in result["why"] and "--savedir" in result["why"]


def test_a_trial_waits_for_a_process_that_still_runs_in_the_folder(
    tmp_path: Path, requests: Requests
) -> None:
    earlier = RunFolder(tmp_path / FOLDER, {}, [])
    found = begun(tmp_path)
    assert not FakeChild.made and found.step()["is_held"] is True
    earlier.finish(successful=False)
    assert found.step()["is_held"] is False
    assert len(FakeChild.made) == 1


def test_results_can_be_sent_as_json(tmp_path: Path, requests: Requests) -> None:
    found = begun(tmp_path)
    log(tmp_path / FOLDER, [(10, 2, 0.5)])
    FakeChild.made[0].finish({"ended": True})
    assert json.loads(json.dumps(found.step()))["step"] == 10
