# SPDX-License-Identifier: Apache-2.0
"""Numbers in the info of a game's last step become columns of the log, however work is spread."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from later import later
from small_schemes import impala_of, off_policy_of, scheme_of
from source_envs import Telling

from torchbeast import Learner
from torchbeast.core.envs import VecEnv
from torchbeast.envs import EnvError, EnvOptions, EnvSpec, make
from torchbeast.reporting.log_files import read_fields, read_logs

ASYNCHRONOUS = {"col_remote_workers": 1, "col_communication": "asynchronous"}
KEYWORDS = ("steps", "squared", "sometimes", "word")
ENVS = {"env_fn": Telling, "vec_env_size": 2, "info_keywords": KEYWORDS}


@pytest.mark.parametrize(
    ("make_scheme", "axes"),
    [
        (scheme_of, {}),
        later(scheme_of, {"col_remote_workers": 2}),
        (impala_of, ASYNCHRONOUS),
        (impala_of, {**ASYNCHRONOUS, "inference": "central"}),
        (scheme_of, {"grad_remote_workers": 2}),
        (off_policy_of, {}),
    ],
)
def test_means_over_the_same_games_as_the_returns_are_logged(
    make_scheme: Any, axes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if axes.get("inference") == "central":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    scheme = make_scheme(envs=ENVS, **axes)
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        for _ in range(30):
            learner.step()
        learner.stop()
    assert {f"info_{name}" for name in KEYWORDS} <= set(read_fields(tmp_path / "run"))
    fields = (tmp_path / "run" / "fields.csv").read_text().splitlines()
    assert "info_squared" in fields[0], "a column from the first row on"
    rows = [row for row in read_logs(tmp_path / "run") if "mean_episode_length" in row]
    assert len(rows) > 3
    for row in rows:
        assert row["info_steps"] == pytest.approx(row["mean_episode_length"])
        # The return of an episode of n steps is 1 + ... + n = (n^2 + n) / 2.
        twice = row["info_squared"] + row["info_steps"]
        assert row["mean_episode_return"] == pytest.approx(twice / 2)
        assert row.get("info_sometimes", 1.0) == 1.0 and "info_word" not in row
    assert any("info_sometimes" in row for row in rows)
    said = re.findall(r"without a finite number '(\w+)'", capsys.readouterr().err)
    assert sorted(said) == ["sometimes", "word"], "each once"


def test_replayed_rollouts_and_their_games_are_not_counted_again(tmp_path: Path) -> None:
    from torchbeast.core.algos import LASER
    from torchbeast.core.storages import OnPolicyVTraceBuffer

    replay = OnPolicyVTraceBuffer.create_factory(
        size=10, replay_size=400, replay_ratio=1, learn_start=20
    )
    scheme = scheme_of(envs=ENVS, algo=LASER.create_factory(), storage=replay)
    with Learner(scheme, 400, tmp_path / "run", seed=1) as learner:
        learner.train()
    rows = list(read_logs(tmp_path / "run"))
    assert any("replay_age" in row for row in rows)
    for row in rows:
        assert row["info_steps"] == pytest.approx(row["mean_episode_length"])


@pytest.mark.parametrize("env", ["Catch", "MinAtar/Breakout-v1", "source_envs:Counting"])
def test_an_environment_without_an_info_is_refused(env: str) -> None:
    spec = EnvSpec(env, options=EnvOptions(info_keywords=("score",)))
    with pytest.raises(EnvError, match=r"info_keywords score are read .*has no info: remove"):
        make(spec, 1)
    with pytest.raises(ValueError, match="has no info"):
        VecEnv.create_factory(env_fn=make, env_kwargs={"env": env}, info_keywords=["score"])


@pytest.mark.parametrize(
    "keywords",
    [("a,b",), ("",), (" a",), ("a", "a"), ("a\n",), ("a\x1b[2J",), ("a\u2028b",), "abc"],
)
def test_keywords_that_are_no_columns_are_refused(keywords: Any) -> None:
    with pytest.raises(ValueError, match="info_keywords"):
        EnvOptions(info_keywords=keywords)


def test_what_is_no_number_is_none() -> None:
    from numpy import array, float64, isnan, testing, zeros

    from torchbeast.core.envs.contract import numbers_of_games, write_numbers

    class Odd:
        def __array__(self, *_: Any) -> Any:
            raise RuntimeError("not here")

    values = [1, True, float64(2.5), array([[3]]), "4", None, zeros(2), [[1], [2, 3]], Odd(), 1j]
    row = zeros(len(values) + 1, "float32")
    info = {index: {"x": value} for index, value in enumerate(values)}
    write_numbers(row, info, "x")
    assert row[:4].tolist() == [1.0, 1.0, 2.5, 3.0]
    assert isnan(row[4:]).all() and math.isnan(row[-1]), "the last one ended no game"
    sent = numbers_of_games(info, ("y", "x"), range(len(row)))
    assert isnan(sent[:, 0]).all(), "no info has it"
    testing.assert_array_equal(sent[:, 1], row)
