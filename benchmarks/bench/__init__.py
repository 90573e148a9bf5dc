# SPDX-License-Identifier: Apache-2.0
"""Measures each stage of PolyBeast alone, PolyBeast end to end, and names the bottleneck.

    environment.py   stepping, in as many processes as the program uses
    transport.py     servers -> pool -> batcher and queue, with fixed environments
    inference.py     batches of the size that streams send
    learner.py       updates on synthetic batches
    end_to_end.py    PolyBeast itself

Each stage yields a function that measures it for a number of seconds: `sample.Measure`. The other
programs in benchmarks/ use the same functions. `python -m torchbeast.bench` starts the program.
"""

import os
from pathlib import Path

# Processes that are started import modules of this package too.
_PATHS = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))
