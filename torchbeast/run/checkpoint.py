# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: files, written atomically, loadable with torch.load(weights_only=True).

model_state_dict  optimizer_state_dict    weights of the actor, state of the optimiser
scheduler_state_dict                      the four counters, and where schedules began
algorithm_state_dict                      other models and optimisers
stats                                     step and other counts
flags                                     every flag of the run
format                                    FORMAT of the program that wrote it
model                                     name of the network, never auto
model_kwargs                              its keyword arguments, also the algorithm's own
reward_input                              how rewards are transformed for the network's input
reads_values                              whether it encodes leaves by their space's value ranges
observation_space  action_space           of one environment, before frames are stacked
frame_stack                               number of frames in a stack
rng                                       torch's random generators
callbacks                                 states of the run's callbacks, by name
env_options                               what the environments were given last, if anything

The file is a zip archive, as torch.save has written since PyTorch 1.6, in which every record has a
CRC-32. torch.load ignores these checksums; `load` verifies them.

model.tar      the newest checkpoint of a run; if it is damaged, model.1.tar is used
model.1.tar    the checkpoint before it
model.2.tar    the checkpoint before that

Files with such names in the folder of a run belong to the run, which removes the oldest ones. Files
after a gap of two numbers are ignored. From the first save on, model.tar exists at any moment, even
if the process or the machine dies. Only on file systems without hard links is it missing for the
last moment of a save, and model.1.tar is used instead.
"""

from __future__ import annotations

import errno
import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from torchbeast.core.actors.contract import Agent
from torchbeast.core.base.computing import numpys_scalars
from torchbeast.core.base.specs import ActorSpec, kwargs_of
from torchbeast.core.envs.spaces import space_from_json, space_to_json
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.core.update.saving import ALGORITHM, check_fits
from torchbeast.envs.env_process import Spaces
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError, as_usage_error, expanded
from torchbeast.reporting.run_folder import (
    CHECKPOINT,
    replaced_atomically,
    runs_next_to,
    write_atomically,
)

# 1: has the name of the network. Files of TorchBeast 2019 lack a format.
FORMAT = 1
# Errors of file servers or memory, which may not occur the next time. EINVAL, for example, is not
# among them, because damaged files cause it too.
_OF_MACHINE = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_FOREIGN = re.compile(r"Unsupported (?:global|class)\S* (?:GLOBAL )?([\w.]+)")
KEYS = ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "stats", "flags")


class Damaged(UsageError):
    """A file that is not a valid checkpoint: truncated, changed, or something else."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not a valid checkpoint ({reason}): move it away to start over")
        self.path, self.reason = path, reason


class Unreadable(Damaged):
    """A file that the disk cannot read: mostly a bad sector, rarely a temporary error."""


def save(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes the checkpoint. The previous file stays until the new one is safely on the disk."""
    write_atomically(path, as_bytes(checkpoint))


def as_bytes(checkpoint: Mapping[str, Any]) -> memoryview:
    """Returns the contents of a checkpoint file."""
    torch.serialization.set_crc32_options(True)  # in case somebody has turned checksums off
    data = io.BytesIO()
    torch.save(dict(checkpoint), data)
    return data.getbuffer()


def load(path: str | Path, needed: Sequence[str] = KEYS) -> dict[str, Any]:
    """Reads a checkpoint to the CPU, without running code from it.

    Args:
        path: The file, such as model.tar.
        needed: Keys that the checkpoint must have.

    Returns:
        The entries by name, such as model_state_dict, flags and stats.

    Raises:
        Damaged: A UsageError, if the file is not a checkpoint.
        UsageError: If the file is missing, cannot be read, lacks a needed key, or has a later
            format.
        RunError: If the machine cannot read it now.
    """
    path = expanded(path)
    try:
        with open(path, "rb") as file:
            _verify(path, file)
            checkpoint = _load(file)
    except Damaged:
        raise
    except FileNotFoundError:
        path = path.absolute()
        raise UsageError(f"there is no checkpoint at {path}: {_instead_of(path)}") from None
    except PermissionError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): make it readable") from None
    except Exception as error:  # torch raises various types for files of other kinds
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise Unreadable(path, f"disk error: {error.strerror}") from error
        if fault := _fault_of_machine(error):
            raise RunError(
                f"{path} could not be read ({fault}). The file itself may be intact: fix the cause "
                "and try again"
            ) from error
        raise Damaged(path, _fault(path, error)) from error
    found = checkpoint if isinstance(checkpoint, dict) else {}
    if found.get("format", FORMAT) != FORMAT:
        raise UsageError(
            f"{path} has format {found['format']}, but this TorchBeast reads formats up to "
            f"{FORMAT}: use the newer TorchBeast that wrote it"
        )
    if missing := [key for key in needed if key not in found]:
        raise UsageError(f"{path} is not the checkpoint of a run: it lacks {', '.join(missing)}")
    return found


def _instead_of(path: Path) -> str:
    """Returns the end of a message about a file that does not exist: what there is beside it."""
    if path.suffix != ".tar" or not path.parent.is_dir():
        return runs_next_to(path.parent if path.suffix == ".tar" else path)
    names = ", ".join(sorted(file.name for file in path.parent.glob("*.tar")))
    if not names:
        return f"there are none in {path.parent}"
    return f"the checkpoints in {path.parent} are {names}"


def recorded_env_spec(checkpoint: Mapping[str, Any]) -> EnvSpec:
    """Returns the environment of the run; its name is empty if the file does not record one.

    Files of the original TorchBeast do not always record it.
    """
    flags = checkpoint["flags"]
    name, kwargs = flags.get("env") or "", flags.get("env_kwargs", {})
    with as_usage_error():
        return EnvSpec.from_json({"name": name, "kwargs": kwargs, "options": flags})


def labels(agent: Agent, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a checkpoint that do not change during a run: its flags, and what the
    agent is and was made for.
    """
    return {
        "format": FORMAT,
        "flags": flags,
        "model": agent.spec.name,
        "model_kwargs": dict(agent.spec.kwargs),
        "reward_input": agent.spec.reward_input,
        "reads_values": agent.spec.reads_values,
        "observation_space": space_to_json(agent.single_frame_space),
        "action_space": space_to_json(agent.action_space),
        "frame_stack": agent.frame_stack,
    }


def spaces(checkpoint: Mapping[str, Any]) -> Spaces | None:
    """Returns the spaces of the run's environment, without stacks of frames; None for files that do
    not record them.

    Raises UsageError if the record makes no sense.
    """
    if "observation_space" not in checkpoint:
        return None
    with as_usage_error():
        observation = space_from_json(checkpoint["observation_space"])
        action = space_from_json(checkpoint.get("action_space", {}))
        return observation, action, int(checkpoint.get("frame_stack", 1))


def actor_spec(checkpoint: Mapping[str, Any]) -> ActorSpec:
    """Returns the spec of the network to which the weights belong; its name is "auto" if unknown.

    TorchBeast 2019 did not record its networks. The names of the weights tell AtariNet ("shallow")
    from ResNet ("deep"). Both know only dtypes and shapes of observations, and have clipped rewards
    as input, even if the loss used raw rewards.
    """
    flags, weights = checkpoint["flags"], checkpoint["model_state_dict"]
    networks = {"conv1.weight": "shallow", "feat_convs.0.0.weight": "deep"}
    of_2019 = next((network for name, network in networks.items() if name in weights), "auto")
    return ActorSpec.from_json(
        {
            "name": checkpoint.get("model", of_2019),
            "kwargs": checkpoint.get("model_kwargs", kwargs_of(flags)),
            "use_lstm": bool(flags.get("use_lstm", "core.weight_ih_l0" in weights)),
            "reward_input": checkpoint.get("reward_input", "abs_one"),
            "reads_values": checkpoint.get("reads_values", "format" in checkpoint),
        }
    )


def _fault_of_machine(error: Exception) -> str:
    """Returns the problem of the machine or file server that prevented reading; else ""."""
    if isinstance(error, OSError):
        return error.strerror or "" if error.errno in _OF_MACHINE else ""
    lacks_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
    return "there is too little memory" if lacks_memory else ""


def _fault(path: Path, error: Exception) -> str:
    """Returns why a file could not be loaded, in place of torch's message about its own code."""
    if path.is_dir():
        return "it is a folder"
    if path.stat().st_size == 0:
        return "it is empty"
    if found := _FOREIGN.search(str(error)):
        return f"it contains {found[1]}, but only tensors and plain values are loaded"
    if not zipfile.is_zipfile(path):
        return "it is truncated, or not a checkpoint"
    return "its contents are invalid"


def _verify(path: Path, file: BinaryIO) -> None:
    """Raises Damaged unless every record matches the checksum that torch.save wrote.

    Files of PyTorch before 1.6 do not have checksums, and `_load` refuses truncated files.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if (name := archive.testzip()) is not None:
                raise Damaged(path, f"the checksum of its record {name} is wrong")


def _load(file: BinaryIO) -> Any:
    """Reads tensors and plain values without running any code from the file.

    Modules that the flags name are imported later, when environment, network and algorithm are
    made.
    """
    file.seek(0)
    with numpys_scalars():
        return torch.load(file, map_location="cpu", weights_only=True)


def check_model(model: torch.nn.Module, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Raises UsageError, with the first difference, if the weights belong to another model."""
    with as_usage_error(f"{path} does not fit"):
        check_fits(model, checkpoint["model_state_dict"])


def load_model(model: torch.nn.Module, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Loads saved weights into `model`; raises as `check_model`."""
    check_model(model, checkpoint, path)
    model.load_state_dict(checkpoint["model_state_dict"])


def resume(optimiser_step: OptimiserStep[Any], checkpoint: Mapping[str, Any], path: Path) -> None:
    """Restores models, optimisers, counters and random generators, those of GPUs only if their
    number is the same; raises like `load_model`.
    """
    try:
        optimiser_step.load_state_dict(checkpoint)
    except (ValueError, KeyError) as error:  # also of users' own optimisers
        raise UsageError(f"{path} does not fit: {error}") from error
    if "rng" in checkpoint:
        torch.set_rng_state(checkpoint["rng"]["torch"])
        cuda = checkpoint["rng"].get("cuda", [])
        if cuda and len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)


def first_non_finite_tensor(state: Mapping[str, Any]) -> str | None:
    """Returns the name of the first tensor of models or optimisers with NaN or inf, if any."""
    for key in ("model_state_dict", "optimizer_state_dict", ALGORITHM):
        for name, tensor in _tensors(state.get(key, {}), key.removesuffix("_state_dict")):
            if (tensor.isnan() | tensor.isposinf()).any():  # -inf may be a mask of the network
                return name
    return None


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")


def rng_state() -> dict[str, Any]:
    """Returns the state of torch's random generators."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


class FoundCheckpoint(NamedTuple):
    """A checkpoint, and the newer ones that could not be read."""

    checkpoint: dict[str, Any]
    path: Path
    damaged: Sequence[Damaged] = ()


def numbered(newest: Path, number: int) -> Path:
    """Returns the path of the checkpoint that was written `number` saves before the newest."""
    return newest.with_name(f"{newest.stem}.{number}{newest.suffix}") if number else newest


def existing(newest: Path) -> list[Path]:
    """Returns the checkpoints that exist, the newest first.

    An interrupted save leaves a gap of at most one number.
    """
    found: list[Path] = []
    number = last = 0
    while number <= last + 2:
        if (path := numbered(newest, number)).exists():
            found.append(path)
            last = number
        number += 1
    return found


def write_newest(newest: Path, data: bytes | memoryview, keep: int) -> None:
    """Writes a checkpoint as the newest one, and keeps `keep` checkpoints in total.

    If it raises OSError, for example because the disk is full, all earlier checkpoints still exist.
    """
    with replaced_atomically(newest) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # safely on the disk, before others are renamed
        _shift(newest, keep)
    for path in existing(newest)[keep:]:
        path.unlink()


def load_newest(newest: Path, needed: Sequence[str] = KEYS) -> FoundCheckpoint:
    """Reads the newest checkpoint that is not damaged, or the one that has another name.

    Raises like `load`. If all are damaged, raises UsageError with all names, or RunError if the
    disk cannot read any of them.
    """
    damaged: list[Damaged] = []
    is_runs = newest.name == CHECKPOINT  # which alone has earlier ones beside it
    for path in (existing(newest) if is_runs else []) or [newest]:
        try:
            return FoundCheckpoint(load(path, needed), path, damaged)
        except Damaged as error:
            damaged.append(error)
    is_disk = all(isinstance(error, Unreadable) for error in damaged)
    if len(damaged) == 1 and not is_disk:
        raise damaged[0]
    kind = RunError if is_disk else UsageError  # a network disk may come back
    raise kind(
        f"no checkpoint in {newest.parent} can be read: {_listed(damaged)}; move them away to "
        "start over"
    )


def put_in_place(found: FoundCheckpoint, newest: Path) -> str:
    """Makes the found checkpoint the newest; damaged ones get the ending .damaged.

    The process that writes the run's next checkpoint calls it first. Returns the end of a message
    that names the damaged files, if there are any.
    """
    kept = [error.path.with_name(f"{error.path.name}.damaged") for error in found.damaged]
    for error, path in zip(found.damaged, kept, strict=True):
        os.replace(error.path, path)
    os.replace(found.path, newest)
    return f"; damaged files are now {', '.join(map(str, kept))}" if kept else ""


def describe_fallback(found: FoundCheckpoint, newest: Path) -> str:
    """Returns a message if the found checkpoint is not the newest, with the reason; else ""."""
    if found.path == newest:
        return ""
    why = _listed(found.damaged) if found.damaged else f"there is no {newest}"
    return f"{why}: using the previous checkpoint, {found.path}"


def _shift(newest: Path, keep: int) -> None:
    """Gives every checkpoint the name of the checkpoint before it. Afterwards the newest has both
    names, or only the second name on file systems without hard links.
    """
    second = numbered(newest, 1)
    if keep == 1 or not newest.exists() or (second.exists() and second.samefile(newest)):
        return  # the same file: the last save ended between this and its end
    for number in range(keep - 2, 0, -1):
        if (path := numbered(newest, number)).exists():
            os.replace(path, numbered(newest, number + 1))
    second.unlink(missing_ok=True)
    try:
        os.link(newest, second)
    except OSError:
        os.replace(newest, second)


def _listed(damaged: Sequence[Damaged]) -> str:
    return ", ".join(f"{error.path} is damaged ({error.reason})" for error in damaged)
