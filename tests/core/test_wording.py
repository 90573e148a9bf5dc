# SPDX-License-Identifier: Apache-2.0
"""Sentences name what their reader types: flags for a program, arguments in Python."""

from __future__ import annotations

import pytest

from torchbeast.core.wording import as_arguments, worded

NAMES = {"num_actors": "vec_env_size", "model": "network", "xpid": "log_dir"}
ADVICE = "give fewer --num_actors than --num_actors 4, another --model, or `ray start --head`"


def test_sentences_keep_their_flags_unless_a_caller_has_arguments() -> None:
    assert worded(ADVICE) == ADVICE
    with as_arguments(NAMES):
        assert worded(ADVICE) == (
            "give fewer vec_env_size than vec_env_size 4, another network, or `ray start --head`"
        )
    assert worded(ADVICE) == ADVICE


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, RuntimeError])
def test_an_error_keeps_its_type_and_names_arguments(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="^another log_dir, not num_actors$"), as_arguments(NAMES):
        raise kind("another --xpid, not num_actors")


def test_fields_are_renamed_only_where_it_is_asked_for() -> None:
    with pytest.raises(ValueError, match="^xpid of num_actors$"), as_arguments(NAMES):
        raise ValueError("xpid of num_actors")
    with pytest.raises(ValueError, match="^log_dir of vec_env_size, a model$"):
        with as_arguments(NAMES, fields=True):
            raise ValueError("xpid of num_actors, a model")


def test_an_error_without_a_sentence_is_left_alone() -> None:
    with pytest.raises(OSError, match="--xpid"), as_arguments(NAMES):
        raise OSError("--xpid")
    with pytest.raises(ValueError) as raised, as_arguments(NAMES):
        raise ValueError
    assert raised.value.args == ()
