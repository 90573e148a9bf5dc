# SPDX-License-Identifier: Apache-2.0
"""Trains several agents that differ in some settings, and compares them.

--set learning_rate=0.0003,0.0006 seed=1,2       two values of two flags: four agents

settings.py   command line -> Agents: name, settings, command line of each
record.py     the sweep's folder: what it compares, so that it can go on
runner.py     runs agents as processes, a few at a time -> agent_main.py, one process each
on_ray.py     the same on the nodes of a Ray cluster, with an actor for each process
asha.py       decides which agents end early
following.py  reads the logs of an agent, which may run anywhere that writes to this disk
table.py      what agents do: their rows, on the terminal
ranking.py    the order of the settings in the end, sweep.csv and the joint plot
"""
