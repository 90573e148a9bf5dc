# SPDX-License-Identifier: Apache-2.0
"""Measures each stage of PolyBeast alone, PolyBeast end to end, and names the bottleneck.

    environment.py   stepping, in as many processes as the program uses
    transport.py     servers -> pool -> batcher and queue, with fixed environments
    inference.py     batches of the size that streams send
    learner.py       updates on synthetic batches
    end_to_end.py    PolyBeast itself

Each stage yields a function that measures it for a number of seconds: `sample.Measure`. benchmarks/
uses the same functions.
"""
