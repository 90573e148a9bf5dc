# SPDX-License-Identifier: Apache-2.0
"""The session of a run: signal handlers, the run's folder, and the error to report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.errors import RunError, UsageError, what_users_code_raised, without_our_frames
from torchbeast.fleets.supervisor import Failure, Supervisor
from torchbeast.fleets.waiting import say
from torchbeast.reporting.output import lossy_output
from torchbeast.reporting.run_folder import RunFolder


class Session(NamedTuple):
    """The supervisor and the folder of a run."""

    supervisor: Supervisor
    folder: RunFolder


@contextmanager
def session(path: Path, settings: dict[str, Any], is_kept: bool = True) -> Iterator[Session]:
    """Opens a run and ends it; raises the run's first failure as UsageError or RunError.

    An exception of the body is a failure of the run, just like an exception of one of its threads.
    Failing to print is not.

    path: the run's folder. If it is new, and the run ends with a UsageError before it has written
        anything but its metadata, the folder is removed again.
    settings: every flag by its name, for meta.json.
    is_kept: whether the folder stays after the run, so that errors can point to its log.
    """
    supervisor = Supervisor()
    with lossy_output(), supervisor.signals():
        folder = RunFolder(path, settings)
        try:
            yield Session(supervisor, folder)
        except Exception as error:
            supervisor.fail("", error)
        finally:
            supervisor.stop("the program ended")
            if supervisor.interrupted:
                say(f"Stopped by {supervisor.reason}.")
            failure = supervisor.failure
            folder.finish(successful=failure is None)
            if failure is not None and isinstance(failure.error, UsageError):
                folder.discard()
    raise_failure(supervisor.failure, folder if is_kept else None)


def raise_failure(failure: Failure | None, folder: RunFolder | None = None) -> None:
    """Raises a failure as UsageError or RunError; does nothing for None."""
    if failure is None:
        return
    if isinstance(failure.error, UsageError):
        raise failure.error
    # if the user's network or algorithm raised it, its lines of the traceback
    said = "" if isinstance(failure.error, RunError) else what_users_code_raised(failure.error)
    if not said:
        said = without_our_frames(str(failure))
    elif failure.origin:
        said = f"{failure.origin}: {said}"
    where = f"\nMore is in {folder.path / 'out.log'}" if folder else ""
    raise RunError(f"{said}{where}") from failure.error
