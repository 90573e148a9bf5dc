# SPDX-License-Identifier: Apache-2.0
"""The program: measures all stages, interleaved, and reports them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping

from figures import check_json, interleaved, machine, write_record
from rich.console import Console

from bench.chart import check, draw, table
from bench.flags import BenchFlags
from bench.hosts import load_of, network_of, sentence
from bench.hosts import table as hosts_table
from bench.limits import Figure, Verdict, figure, judge, predict
from bench.sample import Ended, Measure, Sample, check_goes_on
from bench.scaling import predict as predict_hosts
from bench.stages import Stages
from torchbeast.cli.command_line import flatten
from torchbeast.errors import EXIT_DONE, RunError, UsageError, refusing_paths, what_it_raised
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import available_cores
from torchbeast.reporting.run_folder import raise_failure

Samples = dict[str, list[Sample]]

_BUSY = 0.5  # load per core before the start, above which other programs disturb

_LEFT_OUT = (
    "Transport and PolyBeast end to end are left out, because the compiled module libtorchbeast is "
    "not installed. MonoBeast works without it."
)


def run(flags: BenchFlags) -> int:
    """Measures and reports; returns the exit code."""
    check_outputs(flags)
    supervisor = Supervisor()
    with supervisor.signals():
        try:
            made = Stages(flags, supervisor)
            if flags.measuring.hosts is None:
                if not (is_compiled := _is_compiled()):
                    print(_LEFT_OUT, flush=True)
                report(flags, measure(flags, supervisor, made, is_compiled))
            else:
                report_hosts(flags, measure(flags, supervisor, made, is_compiled=False), made)
        except Ended:
            raise_failure(supervisor.failure)
            print(f"Stopped by {supervisor.reason}.", flush=True)
    return EXIT_DONE


def check_outputs(flags: BenchFlags) -> None:
    """Raises UsageError when the results could not be written in the end."""
    with refusing_paths("use a file in a folder that exists"):
        if flags.measuring.json is not None:
            check_json(flags.measuring.json)
        if flags.measuring.png is not None:
            check(flags.measuring.png)


def measure(flags: BenchFlags, supervisor: Supervisor, made: Stages, is_compiled: bool) -> Samples:
    """Measures all stages, interleaved; returns their samples by name.

    is_compiled: whether libtorchbeast is installed; without it, transport and end to end are left
    out.
    """
    print(made.summary, flush=True)
    print(made.cost_of_leaves(), flush=True)
    if busy := others(os.getloadavg()[0], available_cores()):
        print(busy, flush=True)
    with made.ready(is_compiled) as stages:
        runs = {
            name: functools.partial(_one, name, stage, flags.measuring.seconds, supervisor)
            for name, stage in stages.items()
        }
        return interleaved(runs, flags.measuring.repeats)


def others(load: float, cores: int) -> str:
    """Returns a warning when other programs use the machine, else an empty string.

    load: the load average before the start.
    """
    if load < _BUSY * cores:
        return ""
    return (
        f"Other programs are using this machine (load {load:.1f} on {cores} cores), so the steps/s "
        "measured here are too low. The CPU time per step is more reliable."
    )


def _one(name: str, stage: Measure, seconds: float, supervisor: Supervisor) -> Sample:
    check_goes_on(supervisor)
    try:
        sample = stage(seconds)
    except (RunError, UsageError):
        raise
    except Exception as error:
        raise RunError(f"the stage {name} failed: {what_it_raised(error)}") from error
    check_goes_on(supervisor)
    return sample


def _is_compiled() -> bool:
    try:
        import libtorchbeast  # noqa: F401
    except ImportError as error:
        if error.name not in ("libtorchbeast", "libtorchbeast._C", "nest"):
            raise
        return False
    return True


def report(flags: BenchFlags, samples: Samples) -> None:
    """Prints the table and the verdict; writes the files that the flags name."""
    figures = {name: figure(of_stage) for name, of_stage in samples.items()}
    cores, title = available_cores(), _title(flags)
    verdict = judge(figures, cores)
    Console().print(table(figures, cores, title))
    print(verdict.sentence, flush=True)
    if flags.measuring.json is not None:
        _write_json(flags, samples, figures, verdict)
        print(f"Every figure is in {flags.measuring.json}")
    if flags.measuring.png is not None:
        draw(figures, cores, f"{title}\n{verdict.sentence}", flags.measuring.png)
        print(f"The chart is in {flags.measuring.png}")


def report_hosts(flags: BenchFlags, samples: Samples, made: Stages) -> None:
    """Prints what one learner makes of the hosts; writes the file that the flags name."""
    measuring = flags.measuring
    assert measuring.hosts is not None
    figures, cores = (
        {name: figure(of_stage) for name, of_stage in samples.items()},
        available_cores(),
    )
    load = load_of(figures, made.plans, measuring.hosts, made.frame_bytes)
    found = predict_hosts(
        load, network_of(figures), cores, link_bytes=measuring.link_gbit * 1e9 / 8
    )
    Console().print(hosts_table(found, _title(flags)))
    print(sentence(found, measuring.hosts), flush=True)
    if measuring.json is not None:
        known = {"network": dataclasses.asdict(network_of(figures)), "limits": found.limits}
        write_record(measuring.json, flatten(flags), load=dataclasses.asdict(load), **known)


def _title(flags: BenchFlags) -> str:
    lstm = " with an LSTM" if flags.model.use_lstm else ""
    return (
        f"{flags.environment.spec.name}, --model {flags.model.model}{lstm}, "
        f"{flags.fleet.environments()} environments, "
        f"rollouts of {flags.rollouts.unroll_length} steps, "
        f"{flags.rollouts.batch_size} per update; {machine()}"
    )


def _write_json(
    flags: BenchFlags, samples: Samples, figures: Mapping[str, Figure], verdict: Verdict
) -> None:
    assert flags.measuring.json is not None
    write_record(
        flags.measuring.json,
        flatten(flags),
        stages={
            name: {
                **found._asdict(),
                "every_steps_per_second": [sample.steps_per_second for sample in samples[name]],
                "every_cpu_us": [sample.cpu_us for sample in samples[name]],
            }
            for name, found in figures.items()
        },
        cores=available_cores(),
        predicted_steps_per_second=predict(figures, available_cores()),
        **verdict._asdict(),
    )
