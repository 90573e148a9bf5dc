# SPDX-License-Identifier: Apache-2.0
"""A learner asks servers for descriptions, and refuses servers that do not fit."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchbeast.core.envs.spaces import ArraySpec, Discrete, space_to_json
from torchbeast.envs import EnvOptions, EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.servers import discovery
from torchbeast.servers.config import SecurityConfig

CATCH: dict[str, Any] = {
    "protocol_version": 1,
    "env_id": "Catch",
    "num_envs": 2,
    "num_streams": 2,
    "num_servers": 0,
    "frame_stack": 1,
    "observation": {"board": ("float32", (10, 5)), "rest": (("uint8", ()), ("bool", (3,)))},
    "action_space": {"type": "Discrete", "n": 3, "start": 0},
}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The descriptions by address; other addresses do not answer."""
    served: dict[str, dict[str, Any]] = {}

    def describe(address: str, timeout_s: float, credentials: Any) -> dict[str, Any]:
        if address not in served:
            raise TimeoutError(f"nobody answers at {address}")
        return served[address]

    monkeypatch.setattr("libtorchbeast.describe", describe)
    return served


def find_servers(
    hosts: list[str],
    num_envs: int | None,
    timeout: float,
    security: SecurityConfig | None = None,
    check_goes_on: Callable[[], None] = lambda: None,
) -> discovery.ServerFleet:
    asking = discovery.Asking(timeout, security, check_goes_on)
    return discovery.find_servers(hosts, num_envs, asking)


def test_servers_are_asked_until_enough_environments_are_found(servers: dict) -> None:
    servers.update({f"unix:/a.{i}": CATCH for i in range(5)})
    fleet = find_servers(["unix:/a"], 8, timeout=1.0)
    assert fleet.stream_addresses == ["unix:/a.0", "unix:/a.0", "unix:/a.1", "unix:/a.1"]
    assert fleet.envs_per_stream == [2, 2, 2, 2] and fleet.num_envs == 8


def test_without_num_envs_all_servers_that_were_started_together_are_awaited(servers: dict) -> None:
    servers.update({f"unix:/a.{i}": CATCH | {"num_servers": 3} for i in range(5)})
    fleet = find_servers(["unix:/a"], None, timeout=1.0)
    assert fleet.stream_addresses == [f"unix:/a.{i // 2}" for i in range(6)]
    del servers["unix:/a.2"]
    with pytest.raises(RunError, match=r"answers at unix:/a\.2 .waited 0\.1 s.: start servers"):
        find_servers(["unix:/a"], None, timeout=0.1)


def test_without_num_envs_at_least_one_server_must_answer(servers: dict) -> None:
    with pytest.raises(RunError, match=r"answers at unix:/a\.0 \(waited 0\.1 s\): start servers"):
        find_servers(["unix:/a"], None, timeout=0.1)


def test_a_fleet_describes_what_its_servers_serve(servers: dict) -> None:
    servers["unix:/a.0"] = CATCH
    fleet = find_servers(["unix:/a"], None, timeout=1.0)
    assert fleet.env == EnvSpec("Catch") and fleet.action_space == Discrete(3)
    assert fleet.observation_space == {
        "board": ArraySpec((10, 5), "float32"),
        "rest": (ArraySpec((), "uint8"), ArraySpec((3,), "bool")),
    }


def test_ranges_of_values_reach_the_learner(servers: dict) -> None:
    space = {
        "board": ArraySpec((10, 5), "float32", 0, 5976),
        "rest": (ArraySpec((), "uint8", categories=(4,)), ArraySpec((3,), "bool")),
    }
    servers["unix:/a.0"] = CATCH | {"observation_space": space_to_json(space)}
    assert find_servers(["unix:/a"], None, timeout=1.0).observation_space == space


def test_a_space_of_other_observations_is_reported_with_its_address(servers: dict) -> None:
    other = space_to_json(ArraySpec((2,), "float32"))
    servers["unix:/a.0"] = CATCH | {"observation_space": other}
    with pytest.raises(RunError, match=r"from unix:/a\.0 is not valid: its observation_space is"):
        find_servers(["unix:/a"], None, timeout=1.0)


@pytest.mark.parametrize("key", ["observation_space", "action_space"])
def test_an_invalid_action_space_is_reported_with_its_address(servers: dict, key: str) -> None:
    servers["unix:/a.0"] = CATCH | {key: {"type": "Sphere"}}
    with pytest.raises(RunError, match=r"the description from unix:/a\.0 is not valid: .*Sphere"):
        find_servers(["unix:/a"], None, timeout=1.0)


@pytest.mark.parametrize(
    ("key", "space"),
    [("observation_space", Discrete(3)), ("action_space", ArraySpec((2,), "float32"))],
)
def test_a_space_of_the_other_kind_is_reported_with_its_address(
    servers: dict, key: str, space: Any
) -> None:
    servers["unix:/a.0"] = CATCH | {key: space_to_json(space)}
    with pytest.raises(RunError, match=r"from unix:/a\.0 is not valid: its spaces are mixed up"):
        find_servers(["unix:/a"], None, timeout=1.0)


def test_a_server_of_the_original_has_no_action_space(servers: dict) -> None:
    servers["unix:/a.0"] = CATCH | {"action_space": None, "env_id": "", "num_streams": 1}
    assert find_servers(["unix:/a"], None, timeout=1.0).action_space is None


def test_more_environments_than_num_envs_are_refused(servers: dict) -> None:
    servers["unix:/a.0"] = CATCH
    with pytest.raises(UsageError, match="serve 4 environments, but num_envs is 3"):
        find_servers(["unix:/a"], 3, timeout=1.0)


def test_servers_of_the_original_are_awaited_until_there_are_num_envs_environments(
    servers: dict,
) -> None:
    servers["unix:/a.0"] = CATCH
    with pytest.raises(RunError, match=r"no environment server answers at unix:/a\.1"):
        find_servers(["unix:/a"], 9, timeout=1.0)


def test_options_and_keyword_arguments_of_environments_reach_the_learner(servers: dict) -> None:
    servers["unix:/a.0"] = CATCH | {"options": {"frame_skip": 2, "of_a_later_version": 1}}
    told = EnvSpec("Catch", options=EnvOptions(frame_skip=2))
    assert find_servers(["unix:/a"], None, timeout=1.0).env == told
    servers["unix:/a.0"] = CATCH | {"options": {"env_kwargs": {"rows": 8}}}
    assert find_servers(["unix:/a"], None, timeout=1.0).env == EnvSpec("Catch", {"rows": 8})
    servers["unix:/a.0"] = CATCH | {"options": None}
    assert find_servers(["unix:/a"], None, timeout=1.0).env == EnvSpec("Catch")
    for odd in ("odd", {"observation_keys": 5}, {"env_kwargs": [8]}):
        servers["unix:/a.0"] = CATCH | {"options": odd}
        with pytest.raises(RunError, match=r"the description from unix:/a\.0 is not valid"):
            find_servers(["unix:/a"], None, timeout=1.0)


def test_a_server_does_not_decide_where_the_learner_writes_versions(servers: dict) -> None:
    servers["unix:/a.0"] = CATCH | {"options": {"selfplay": "/etc"}}
    assert find_servers(["unix:/a"], None, timeout=1.0).env == EnvSpec("Catch")


def test_the_info_keywords_are_those_that_come_with_steps(servers: dict) -> None:
    servers["unix:/a.0"] = CATCH | {"options": {"info_keywords": ["x"]}, "info_keywords": ["y"]}
    told = EnvSpec("Catch", options=EnvOptions(info_keywords=("y",)))
    assert find_servers(["unix:/a"], None, timeout=1.0).env == told
    del servers["unix:/a.0"]["info_keywords"]
    assert find_servers(["unix:/a"], None, timeout=1.0).env == EnvSpec("Catch")


@pytest.mark.parametrize("name", ["a,b", " a", "a\nb", "\x1b[2J", "\u2028"])
def test_info_keywords_that_are_no_columns_are_refused_with_the_address(
    servers: dict, name: str
) -> None:
    servers["unix:/a.0"] = CATCH | {"info_keywords": ["x", name]}
    with pytest.raises(RunError, match=r"from unix:/a\.0 is not valid: info_keywords become col"):
        find_servers(["unix:/a"], None, timeout=1.0)


ALIKE = ["env_id", "frame_stack", "action_space", "observation_space", "options", "info_keywords"]


@pytest.mark.parametrize("key", ALIKE)
def test_servers_of_different_environments_are_refused(servers: dict, key: str) -> None:
    servers["unix:/a.0"], servers["unix:/a.1"] = CATCH, CATCH | {key: "other"}
    with pytest.raises(RunError, match=f"must have the same environment, but their {key} is"):
        find_servers(["unix:/a"], 8, timeout=1.0)


PLAIN = SecurityConfig(insecure=True)


def test_every_server_of_every_host_is_found(servers: dict) -> None:
    servers.update({f"a:{port}": CATCH | {"num_servers": 2} for port in (50, 51, 52)})
    servers.update({"b:50": CATCH | {"num_servers": 1}, "b:51": CATCH})
    fleet = find_servers(["a:50", "b:50"], None, 1.0, PLAIN)
    assert fleet.stream_addresses == ["a:50"] * 2 + ["a:51"] * 2 + ["b:50"] * 2
    assert fleet.num_envs == 12


def test_a_server_of_the_original_is_a_host_of_one_server(servers: dict) -> None:
    servers["a:50"] = servers["a:51"] = CATCH | {"num_servers": 0}
    assert find_servers(["a:50"], None, 1.0, PLAIN).stream_addresses == ["a:50"] * 2


def test_a_server_that_belongs_to_a_host_named_before_is_refused(servers: dict) -> None:
    servers.update({f"a:{port}": CATCH | {"num_servers": 2} for port in (50, 51)})
    with pytest.raises(UsageError, match="a:51 is on a host that is already listed"):
        find_servers(["a:50", "a:51"], None, 1.0, PLAIN)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RunError("b:50: its certificate has expired"), "b:50: its certificate has expired"),
        (
            None,
            "no environment server answers at b:50 (waited 0.1 s): start servers there (python -m "
            "torchbeast.polybeast_env)",
        ),
    ],
)
def test_a_run_begins_with_the_hosts_that_answer_unless_their_number_is_given(
    servers: dict,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception | None,
    said: str,
) -> None:
    """A learner must come back while one of many hosts is down."""

    def explain(address: str, files: object) -> None:
        if fault is not None:
            raise fault

    monkeypatch.setattr(discovery, "explain", explain)
    servers |= {"a:50": CATCH, "c:50": CATCH}
    fleet = find_servers(["a:50", "b:50", "c:50"], None, 0.1, PLAIN)
    assert list(fleet.descriptions) == ["a:50", "c:50"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == f"starting without the host b:50: {said}"
    with pytest.raises(RunError, match=re.escape(said)):
        find_servers(["a:50", "b:50", "c:50"], 12, 0.1, PLAIN)
    with pytest.raises(RunError, match=re.escape(said)):
        find_servers(["b:50"], None, 0.1, PLAIN)


def test_where_no_host_can_be_used_the_reason_of_each_is_said(
    servers: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explain(address: str, *_: object) -> None:
        if address == "b:50":
            raise RunError("b:50: its certificate has expired")

    monkeypatch.setattr(discovery, "explain", explain)
    with pytest.raises(RunError, match="its certificate has expired"):
        find_servers(["a:50", "b:50", "c:50"], None, 0.1, PLAIN)


def test_a_stop_ends_the_wait_for_hosts(servers: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "explain", lambda *_: None)
    asked = threading.Event()

    def describe(address: str, timeout_s: float, credentials: Any) -> None:
        asked.set()
        threading.Event().wait(timeout_s)
        raise TimeoutError

    monkeypatch.setattr("libtorchbeast.describe", describe)

    def check_goes_on() -> None:
        if asked.is_set():
            raise RunError("the run has ended")

    with pytest.raises(RunError, match="the run has ended"):
        find_servers(["a:50", "b:50"], None, 1e6, PLAIN, check_goes_on)


def test_another_number_of_environments_on_hosts_is_refused(servers: dict) -> None:
    servers.update({"a:50": CATCH, "b:50": CATCH})
    assert find_servers(["a:50", "b:50"], 8, 1.0, PLAIN).num_envs == 8
    for number in (4, 9):
        with pytest.raises(UsageError, match=f"8 environments, but num_envs is {number}: use"):
            find_servers(["a:50", "b:50"], number, 1.0, PLAIN)


def test_hosts_of_different_environments_are_refused(servers: dict) -> None:
    servers.update({"a:50": CATCH, "b:50": CATCH | {"env_id": "Memory"}})
    with pytest.raises(
        RunError, match="a:50 and b:50 must have the same environment, but their env_id is"
    ):
        find_servers(["a:50", "b:50"], None, 1.0, PLAIN)


def test_learners_share_out_the_streams_so_that_each_belongs_to_one(servers: dict) -> None:
    """A stream that is in no share would stand still, and one in two would play twice."""
    servers.update({f"unix:/a.{i}": CATCH for i in range(5)})
    fleet = find_servers(["unix:/a"], 20, timeout=1.0)
    shares = [fleet.share(rank, 3) for rank in range(3)]
    assert [len(share.stream_addresses) for share in shares] == [3, 3, 4]
    together = [address for share in shares for address in share.stream_addresses]
    assert together == fleet.stream_addresses
    assert sum(share.num_envs for share in shares) == fleet.num_envs == 20
    assert shares[1].observation_space == fleet.observation_space


def test_fewer_streams_than_learners_are_refused_with_both_numbers(servers: dict) -> None:
    servers["unix:/a.0"] = CATCH
    fleet = find_servers(["unix:/a"], None, timeout=0.1)
    assert fleet.share(1, 2).stream_addresses == ["unix:/a.0"]
    with pytest.raises(
        UsageError, match="3 learners need one stream .* the servers have 2 streams"
    ):
        fleet.share(0, 3)


def test_a_fleet_is_told_to_other_learners_as_json(servers: dict) -> None:
    servers.update({f"unix:/a.{i}": CATCH for i in range(2)})
    fleet = find_servers(["unix:/a"], 8, timeout=1.0)
    told = discovery.fleet_of(json.loads(json.dumps(fleet.descriptions)))
    for name in ("env", "observation_space", "action_space", "stream_addresses", "envs_per_stream"):
        assert getattr(told, name) == getattr(fleet, name)


def test_a_host_that_is_silent_is_not_examined_beyond_the_time_limit_again(
    servers: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at why a frozen machine does not answer takes three seconds."""
    now, examined = [0.0], []

    def explain(address: str, *_: object) -> None:
        examined.append(address)
        now[0] += 3.0

    monkeypatch.setattr(discovery, "explain", explain)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asking = discovery.Asking(2.0, SecurityConfig(insecure=True))
    with pytest.raises(RunError, match="no environment server answers at a:50"):
        asking.ask("a:50")
    assert examined == ["a:50"]


def test_a_signal_is_noticed_soon_however_long_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [0.0], []

    def describe(address: str, timeout_s: float, credentials: Any) -> None:
        limits.append(timeout_s)
        now[0] += max(timeout_s, 0.001)
        raise TimeoutError(f"no environment server answers at {address}")

    monkeypatch.setattr("libtorchbeast.describe", describe)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(RunError, match="waited 3600 s"):
        discovery.Asking(3600.0, None).ask("unix:/a.0")
    assert max(limits) <= 8.0
