# SPDX-License-Identifier: Apache-2.0
"""Trains several agents that differ in some settings, and compares them.

--set learning_rate=0.0003,0.0006 seed=1,2       two values of two flags: four agents

__main__.py   the program: checks every agent, runs them all, and reports
agents.py     command line -> Agents: name, settings, command line of each; and their record,
              with which the sweep can continue
runner.py     runs agents as processes, a few at a time -> agent_main.py, one process each;
              decides which agents end early
on_ray.py     the same on the nodes of a Ray cluster, with an actor for each process
table.py      reads the logs of agents, which may run anywhere that writes to this disk; shows
              their rows on the terminal, and ranks their settings, with sweep.csv and the plot
"""
