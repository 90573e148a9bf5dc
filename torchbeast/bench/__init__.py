# SPDX-License-Identifier: Apache-2.0
"""What this machine can do: each stage of PolyBeast alone, the whole, and what limits it.

    environment.py   stepping, in as many processes as the program has
    transport.py     servers -> pool -> batcher and queue, with environments that cost nothing
    inference.py     batches of the size that streams send
    learner.py       updates on made-up rollouts
    whole.py         PolyBeast itself

Each stage yields a function that measures it for some seconds: `sample.Measure`. benchmarks/ uses
the same functions.
"""
