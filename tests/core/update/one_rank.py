# SPDX-License-Identifier: Apache-2.0
"""One of several processes that join vectors; started by test_torch_ranks.py.

python one_rank.py ADDRESS RANK SIZE CASE      prints a line of JSON for each result
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from torchbeast.core.update.torch_ranks import TorchRanks, store_at
from torchbeast.errors import RunError


def say(result: Any) -> None:
    print(json.dumps(result), flush=True)


def main(address: str, rank: int, size: int, case: str) -> None:
    host, port = address.split(":")
    ranks = TorchRanks(store_at(host, int(port)), rank, size)
    torch.manual_seed(rank)
    say(ranks.add(1e3 * torch.randn(7)).tolist())
    say([len(m["text"]) for m in ranks.gather({"text": "x" * (rank * 5000)})])
    if rank == 1 and case == "dies":
        time.sleep(1000)  # until it is killed
    if rank == 1 and case == "leaves":
        ranks.leave("its environment broke")
        return
    try:
        ranks.gather({})
    except RunError as error:
        say(str(error))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
