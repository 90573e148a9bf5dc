# SPDX-License-Identifier: Apache-2.0
"""Trains several agents that differ in some settings, and compares them.

--set learning_rate=0.0003,0.0006 seed=1,2       two values of two flags: four agents

__main__.py   the program: checks all agents, runs them, and reports
search.py     the settings: all combinations, or trials from ranges
agents.py     command line -> AgentRuns with name, settings and command line; and their record,
              from which the sweep can continue
runner.py     runs agents as processes (agent_main.py), a few at a time; decides which agents
              end early
on_ray.py     the same on the nodes of a Ray cluster, with an actor for each process
table.py      reads the logs of agents, which may run on any machine that shares the disk; shows
              their rows on the terminal; ranks their settings in sweep.csv and a plot
"""
