# SPDX-License-Identifier: Apache-2.0
"""What importing parts of torchbeast.core loads."""

import subprocess
import sys

import pytest

ENVIRONMENT_SIDE = "import torchbeast.core, torchbeast.core.envs"
LEARNER_SIDE = "import torchbeast.core.algos.impala, torchbeast.core.actors.registry"

UPDATE = """
import torch
from torchbeast.core.algos.optimisers import Adam
from torchbeast.core.algos.optimisers import RMSprop
network = torch.nn.Linear(2, 1)
for kind in (RMSprop, Adam):
    optimizer = kind(network.parameters(), lr=0.1)
    network(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("imports", "unwanted"),
    [
        (ENVIRONMENT_SIDE, ["torch", "gymnasium", "libtorchbeast", "nest"]),
        # torch._dynamo is the compiler: two seconds of every start
        (f"{LEARNER_SIDE}\n{UPDATE}", ["gymnasium", "libtorchbeast", "nest", "torch._dynamo"]),
    ],
)
def test_core_loads_only_what_its_side_needs(imports: str, unwanted: list[str]) -> None:
    code = f"import sys\n{imports}\nprint([name for name in {unwanted} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
