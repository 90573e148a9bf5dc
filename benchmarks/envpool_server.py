# SPDX-License-Identifier: Apache-2.0
"""Steps EnvPool's Atari for environments.py, under a Python that has EnvPool.

Prints `ready`, then reads a number of seconds per line of stdin and prints the steps/s over that
time.

python benchmarks/envpool_server.py Pong-v5 NUM_ENVS NUM_THREADS
"""

from __future__ import annotations

import sys

import envpool
from stepping import steps_per_second


def main() -> None:
    task, num_envs, num_threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    env = envpool.make_gymnasium(
        task,
        num_envs=num_envs,
        num_threads=num_threads,
        seed=0,
        repeat_action_probability=0.0,
        reward_clip=False,
    )
    env.reset()
    print("ready", flush=True)
    for line in sys.stdin:
        rate = steps_per_second(env.step, num_envs, int(env.action_space.n), float(line))
        print(rate, flush=True)


if __name__ == "__main__":
    main()
