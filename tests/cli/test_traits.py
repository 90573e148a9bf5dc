# SPDX-License-Identifier: Apache-2.0
"""What kind of setting each flag is: the lists that once stood in the files that use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from torchbeast.cli.flags import PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.core.base.checks import Trait, names_with, setting
from torchbeast.envs.spec import EnvOptions

PROGRAMS = (MonoBeastFlags, PolyBeastFlags, PolyBeastLearnerFlags, RayBeastFlags)
TO_CONNECT = {
    *("address", "env_servers", "listen", "insecure", "replay_service"),
    *("tls_ca", "tls_cert", "tls_key", "tls_client_ca", "token_file", "metrics_port"),
    *("working_dir", "dashboard"),
}
LISTED: dict[Trait, set[str]] = {
    "connection": TO_CONNECT,
    "command": {
        *("mode", "xpid", "savedir", "follow", "checkpoint", "num_episodes", "sampled"),
        *("random_start", "preset", "suppress_logs", "pause_at", "restart_schedules"),
        *TO_CONNECT,
    },
    "rank": {"pipes_basename", "torch_threads", "device"},
    "agent": {"algo", "model", "model_kwargs", "shared_body", "use_lstm"},
    "task": {"env", "env_kwargs"},
    "served": {"env", "env_kwargs", "num_envs"},
    "atari": {"sticky_actions", "frame_skip", "full_action_space"},
    "incidental": {
        *("seed", "pipes_basename", "connect_timeout", "write_profiler_trace"),
        *("wandb_project", "wandb_upload", "disable_tensorboard", "log_interval"),
        *("disable_checkpoint", "checkpoint_interval", "keep_checkpoints"),
    },
}


@pytest.mark.parametrize("trait", LISTED)
def test_the_flags_of_a_trait_are_those_that_were_listed_by_hand(trait: Trait) -> None:
    assert names_with(trait, *PROGRAMS) == LISTED[trait]


def test_only_running_servers_decide_settings() -> None:
    assert not names_with("served", MonoBeastFlags, PolyBeastFlags, RayBeastFlags)


def test_a_trait_is_found_in_configs_within_and_in_the_objects_themselves() -> None:
    assert names_with("atari", MonoBeastFlags()) == names_with("atari", EnvOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    """Has settings with and without a trait."""

    number: int = 3
    kwargs: Mapping[str, int] = setting(dict, "task")
    name: str = setting("x", "task", "agent")


def test_a_setting_has_its_default_and_its_traits() -> None:
    assert Mine() == Mine(number=3, kwargs={}, name="x")
    assert Mine().kwargs is not Mine().kwargs
    assert (names_with("task", Mine), names_with("agent", Mine)) == ({"kwargs", "name"}, {"name"})
