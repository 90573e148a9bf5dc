# SPDX-License-Identifier: Apache-2.0
"""Sample Factory's own Atari example; sample_factory.py runs it in an environment of its own."""

import sys

import ale_py  # noqa: F401 - registers the games, also in the workers that import this module
from sf_examples.atari.train_atari import main

if __name__ == "__main__":
    sys.exit(main())
