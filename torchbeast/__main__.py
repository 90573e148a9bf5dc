# SPDX-License-Identifier: Apache-2.0
"""One command for all programs: torchbeast PROGRAM FLAGS, or python -m torchbeast PROGRAM FLAGS.

torchbeast train --env CartPole-v1 --algo ppo
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from torchbeast import __version__
from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import EXIT_DONE, EXIT_USAGE

PROGRAMS = {
    "train": "Train an agent on this machine (monobeast).",
    "test": "Evaluate the checkpoint of a run (monobeast --mode test).",
    "plot": "Plot learning curves.",
    "sweep": "Train agents with different settings and rank them.",
    "suite": "Train agents on every task of a suite.",
    "compare": "Compare the scores of two configurations.",
    "export": "Export an agent to a file that runs without TorchBeast.",
    "status": "Show the load of environment servers.",
    "bench": "Measure how fast TorchBeast runs on this machine.",
    "keys": "Create certificates and a token for several machines.",
    "monobeast": "Train on this machine (no compiler needed).",
    "polybeast": "Train with environment servers on this machine.",
    "polybeast_learner": "Train with environment servers that are already running.",
    "polybeast_env": "Serve environments to a learner.",
    "raybeast": "Train on Ray.",
}
MEANS = {"train": ["monobeast"], "test": ["monobeast", "--mode", "test"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program that the first word names, like python -m torchbeast.PROGRAM, which ends the
    process. Returns the exit code if it ran none: 0 for the list of programs, 2 for a wrong name.
    """
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        print(__version__)
        return EXIT_DONE
    if name in ("-h", "--help", "help"):
        print("usage: torchbeast PROGRAM [FLAGS]\n")
        print("\n".join(f"  {program:18} {text}" for program, text in PROGRAMS.items()))
        print("\nRun torchbeast PROGRAM --help for the flags of a program.")
        return EXIT_DONE
    program = name.lower().replace("-", "_")
    if program not in PROGRAMS:
        hint = did_you_mean(program, PROGRAMS)
        print(f"torchbeast: there is no program {name!r}{hint}; see --help", file=sys.stderr)
        return EXIT_USAGE
    module, *first = MEANS.get(program, [program])
    sys.argv = [program, *first, *words]
    runpy.run_module(f"torchbeast.{module}", run_name="__main__", alter_sys=True)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
