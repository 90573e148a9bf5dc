# SPDX-License-Identifier: Apache-2.0
"""Workers as Ray actors.

    without an address       starts Ray on this machine, and ends it with the run
    with an address          joins the cluster there, and leaves it running
    after ray.init()         uses the caller's connection, and leaves it open

Rollouts are results of calls, so Ray puts them into the object store of the worker's node and
transfers them to the learner's node as soon as they are complete. The learner reads them there
without another copy. Weights are put once, and each node fetches them once, by reference. Workers
on the learner's node read them from its memory, without a call and without Ray.

Ray's restarts are off, because sources replace lost workers, and give the replacements new seeds.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import queue
import secrets
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torchbeast.core.base.specs import find_callable
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.fleet import WorkerLocation, WorkerLost
from torchbeast.fleets.system import available_cores
from torchbeast.fleets.waiting import waiting_for
from torchbeast.on_ray import connection
from torchbeast.on_ray.config import CLIENT, Node, RayConfig, Room

_log = logging.getLogger("torchbeast.ray")

_RESERVE_S = 20.0  # time limit to reserve resources for the learner
_END_S = 3.0  # for actors to finish their step; a stuck environment is abandoned
_LAST_LINES = 20  # of a dead worker's output to show
_LAST_BYTES = 65_536  # of each of its files in which they are
_LONGEST_FOLDER = 40  # path of Ray's files; paths of its sockets are limited to 107
_OF_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_MARK = ":"  # prefix of lines that Ray adds to the output of workers, such as :job_id:01
_DIED = "The actor died unexpectedly before finishing this task"  # Ray knows nothing more
_NODE_DIED = "The actor died because its node has died"  # in an ActorDiedError
_START = "start one with `ray start --head`, or {} to start Ray for this run"
_FULL = connection.FULL.format("fewer num_buffers or num_envs, a smaller unroll_length")
_has_made_connection = threading.Event()  # set while a fleet of this process owns it
_GO_ON = "any checkpoint of the run is kept, and resumes it once the cluster can be reached"


def _failure(error: BaseException) -> RunError:
    """Converts an error of Ray to the failure of the run."""
    if isinstance(error, ConnectionError):
        return RunError(
            f"the connection to Ray was lost ({connection.first_sentence(error)}): {_GO_ON}"
        )
    return RunError(f"Ray: {error!r}")


@contextmanager
def _needing_connection() -> Iterator[None]:
    """Converts a lost connection to the failure of the run."""
    try:
        yield
    except ConnectionError as error:
        raise _failure(error) from error


class RayWorker:
    """A handle of one Ray actor."""

    def __init__(self, handle: Any, on_kill: Callable[[RayWorker], None]) -> None:
        self._handle, self._on_kill = handle, on_kill
        self.has_begun = False  # whether it has answered a call

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Calls a method without waiting for it; see Worker."""
        try:
            future = getattr(self._handle, method).remote(*arguments).future()
        except Exception as error:  # of a lost connection, or after Ray's own end at the exit
            then(_failure(error))
            return
        future.add_done_callback(lambda done: self._answered(then, done))

    def _answered(self, then: Callable[[Any], None], done: concurrent.futures.Future[Any]) -> None:
        self.has_begun = True
        then(_result(done))

    def kill(self) -> None:
        """Kills the actor, even if it is still waiting for room."""
        import ray

        connection.end_with(ray.kill, self._handle)
        self._on_kill(self)


class User(NamedTuple):
    """A program that uses Ray. environment: variables of its processes on the nodes."""

    name: str
    how_to_go_on: str  # what to do if Ray kills it
    environment: Mapping[str, str] = MappingProxyType({})


_ROLLOUTS = "torchbeast.collect.worker:RolloutWorker"
RAYBEAST = User("raybeast", connection.RESUME)
LEARNER = User(
    "Learner",
    "The last checkpoint of the run is kept, if there was one; a Learner with the same log_dir "
    "resumes it.",
)


class Actors(NamedTuple):
    """The actors of a fleet.

    kind: "module:attribute" of their class, with LANES. Ray's dashboard shows it as TorchBeast...
    resources: what Ray reserves for each, such as num_cpus.
    last_calls: methods to call to end an actor, before killing it.
    """

    kind: str
    resources: Mapping[str, float]
    last_calls: Sequence[str] = ("end", "close")


class RayFleet(AbstractContextManager["RayFleet"]):
    """The connection of a program to Ray. One per process, used as a context manager.

    Threads: the main thread makes and ends it; any thread may call other methods.
    """

    shares_memory = False

    def __init__(
        self,
        config: RayConfig,
        run: str,
        own_code: bool = False,
        user: User = RAYBEAST,
        actors: Actors | None = None,
    ) -> None:
        """Uses the caller's connection, joins a cluster, or starts Ray here.

        run: name of the run, the prefix of the names of its actors.
        own_code: whether the nodes must import a module of the user.
        actors: None: actors that play rollouts, with the settings of the Config.

        Raises RunError without Ray or a cluster, and UsageError if the learner's resources are not
        available.
        """
        self._config, self._run, self._user = config, run, user
        self._workers: set[RayWorker] = set()  # not killed yet
        self._lock = threading.Lock()
        self._address = config.address or os.environ.get("RAY_ADDRESS")
        self._where = f"the cluster {self._address}" if self._address else "this machine"
        with ExitStack() as opened, waiting_for(f"Ray on {self._where}"):
            if (callers := connection.connected_ray()) is not None:
                self._use(callers)
            else:
                self._connect(own_code, opened)
            self._closing = opened.pop_all()
        self._actors = actors or Actors(_ROLLOUTS, {"num_cpus": config.actor_cpus})
        self._actor_class = _actor_class(self._ray, self._actors)

    def __exit__(self, *_: object) -> None:
        self.end()

    def __str__(self) -> str:
        return f"Ray {self._ray.__version__} on {self._where}: {self.room()}"

    @_needing_connection()
    def room(self) -> Room:
        """Returns the current resources of the cluster."""
        here = self.own_node
        nodes = [_node(node, here) for node in self._ray.nodes() if node["Alive"]]
        return Room(nodes, self._ray.available_resources().get("CPU", 0.0))

    def reserve_for_learner(self) -> None:
        """Reserves CPUs and GPUs of this machine for the learner, and lets it see these GPUs.

        Call it before anything uses a GPU. Raises UsageError if too few of them are free.
        """
        if not self._config.reserves_for_learner:
            return
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle = {"CPU": self._config.learner_cpus, "GPU": self._config.learner_gpus}
        here = f"node:{self._ray.util.get_node_ip_address()}"
        bundle = {name: count for name, count in bundle.items() if count} | {here: 0.001}
        group = placement_group([bundle], strategy="STRICT_PACK", name=f"{self._run}: learner")
        self._closing.callback(connection.end_with, remove_placement_group, group)
        with waiting_for("CPUs or GPUs of this machine that are in use"):
            is_ready = group.wait(_RESERVE_S)
        if not is_ready:
            raise UsageError(
                f"learner_cpus {self._config.learner_cpus:g} and learner_gpus "
                f"{self._config.learner_gpus:g} are not free on this machine"
            )
        if self._config.learner_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus_of(group))

    @_needing_connection()
    def worker(self, name: str, descriptors: Sequence[int] = ()) -> RayWorker:
        """Requests an actor, which starts when there is room for it."""
        options = self._actor_class.options(
            name=f"{self._run}: {name}", scheduling_strategy="SPREAD", **self._actors.resources
        )
        worker = RayWorker(options.remote(name), self._forget)
        with self._lock:
            self._workers.add(worker)
        return worker

    @_needing_connection()
    def put(self, value: Any) -> Any:
        """Puts a value into the object store; returns its reference."""
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError

        try:
            return self._ray.put(value)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise RunError(_FULL) from error

    @_needing_connection()
    def explain(self, error: WorkerLost, place: WorkerLocation | None) -> WorkerLost:
        """Returns the error with the worker's place, its last output, and the state of its node."""
        if place is None:
            return error
        alive = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        if error.has_left or place.node not in alive:
            return WorkerLost(f"its node {place.host} has left the cluster", has_left=True)
        if isinstance(error, _OutOfReach) and place.node != self.own_node:
            return WorkerLost(f"its node {place.host} cannot be reached", has_left=True)
        why = "" if str(error) == _DIED else f" ({error})"
        said = "".join(f"\n  {line}" for line in self._last_lines(place))
        last = f"; last output:{said}" if said else ""
        return WorkerLost(f"process {place.pid} on {place.host} died{why}{last}")

    def end(self) -> None:
        """Ends all actors, and Ray if it was started here. May be called again."""
        with self._lock:
            workers = list(self._workers)
        with ExitStack() as last:  # in reverse order, also if Ctrl-C interrupts a part
            last.callback(self._closing.close)
            for worker in workers:
                last.callback(worker.kill)
            self._let_end([worker for worker in workers if worker.has_begun])

    def _let_end(self, workers: Sequence[RayWorker]) -> None:
        """Lets actors finish their step and end, within a time limit."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        calls = [(worker, method) for worker in workers for method in self._actors.last_calls]
        for worker, method in calls:
            worker.call(answers.put, method)
        deadline = time.monotonic() + _END_S
        with suppress(queue.Empty):
            for _ in calls:
                answers.get(timeout=max(0.0, deadline - time.monotonic()))

    def _forget(self, worker: RayWorker) -> None:
        with self._lock:
            self._workers.discard(worker)

    @property
    def _is_client(self) -> bool:
        return (self._address or "").startswith(CLIENT)

    @property
    def cluster(self) -> str:
        """The address at which other processes on the cluster's nodes join it."""
        return str(self._ray.get_runtime_context().gcs_address)

    @property
    def host(self) -> str:
        """The address of this machine for the nodes of the cluster."""
        if self._is_client:
            raise UsageError(
                f"actors cannot reach a program that uses the cluster from outside, by {CLIENT}: "
                "run it on a node of the cluster"
            )
        return str(self._ray.util.get_node_ip_address())

    @property
    def own_node(self) -> str:
        """The ID of this process's node; "" outside the cluster."""
        return "" if self._is_client else str(self._ray.get_runtime_context().get_node_id())

    def _use(self, ray: Any) -> None:
        """Uses the connection that the caller has made, and keeps it at the end."""
        from ray.util.client import ray as client

        if self._config.address is not None or self._user.environment:
            raise UsageError(
                "Ray is initialised in this process already: call ray.shutdown() first, or remove "
                "the address to use it"
            )
        if _has_made_connection.is_set():
            raise UsageError(
                "Ray was started in this process for another run, with which it ends: end that run "
                "first, or call ray.init() before both"
            )
        self._ray = ray
        self._address = CLIENT if client.is_connected() else self.cluster

    def _connect(self, own_code: bool, opened: ExitStack) -> None:
        """Joins the cluster at the address, or starts Ray here."""
        if self._address is None:
            environment: dict[str, Any] = {}
            options: dict[str, Any] = {
                "num_cpus": available_cores(),
                "include_dashboard": self._config.dashboard,
                "_temp_dir": str(opened.enter_context(_own_files())),
            }
        else:
            folder = self._config.working_dir or (os.getcwd() if own_code else None)
            options, environment = {}, connection.runtime_env(folder)
        if variables := dict(self._user.environment):
            environment["env_vars"] = variables
        said_in, instead = "$RAY_ADDRESS", "unset RAY_ADDRESS"
        if self._config.address:
            said_in, instead = "--address", "remove --address"
        joined = connection.connected(
            self._address or "local",
            said_in,
            _START.format(instead),
            self._user.name,
            self._user.how_to_go_on,
            runtime_env=environment or None,
            **options,
        )
        opened.callback(_has_made_connection.clear)
        self._ray = opened.enter_context(joined)
        _has_made_connection.set()

    def _gpus_of(self, group: Any) -> list[str]:
        """Returns the IDs of the GPUs in a placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(group)
        task = self._ray.remote(_visible_gpus).options(
            num_cpus=0, num_gpus=self._config.learner_gpus, scheduling_strategy=strategy
        )
        return self._ray.get(task.remote())

    def _last_lines(self, place: WorkerLocation) -> list[str]:
        """Returns the last output of a dead worker on this machine; [] on other machines."""
        if self._is_client or place.host != self._ray.util.get_node_ip_address():
            return []
        logs = Path(self._ray._private.worker._global_node.get_logs_dir_path())
        lines = []
        for path in sorted(logs.glob(f"worker-*-{place.pid}.*"), reverse=True):  # .out, .err
            with suppress(OSError), path.open("rb") as file:  # it may be another user's, and long
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                lines += file.read().decode(errors="replace").splitlines()
        return [line for line in lines if not line.startswith(_MARK)][-_LAST_LINES:]


class _OutOfReach(WorkerLost):
    """The connection to a worker broke. If its node has died, Ray only learns of it later."""


def _result(done: concurrent.futures.Future[Any]) -> Any:
    """Returns the result of a call, or the error that represents its exception."""
    from ray import exceptions

    error = done.exception()
    if error is None:
        return done.result()
    if isinstance(error, (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)):
        return RunError(_FULL)
    if isinstance(error, (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError)):
        return RunError(str(error))
    if isinstance(error, exceptions.ActorDiedError) and error.actor_init_failed:
        return WorkerLost(str(error))  # with its traceback: the node may lack a package
    if isinstance(error, exceptions.ActorUnavailableError):
        return _OutOfReach(connection.first_sentence(error))
    if isinstance(error, exceptions.RayError):
        if _NODE_DIED in str(error):
            return WorkerLost("its node has left the cluster", has_left=True)
        return WorkerLost(connection.first_sentence(error))
    return _failure(error)


class _OnRay:
    """Adds to a worker what it needs as a Ray actor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)  # type: ignore[call-arg]  # of the class of the worker
        # Weights are in the object store, which is read-only, and are never written to.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")

    def place(self) -> WorkerLocation:
        """Returns where the worker runs."""
        import ray

        host, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return WorkerLocation(host, os.getpid(), node)

    def fetched(self, weights: Any) -> Any:
        """Returns the weights of a reference.

        The reference is in a list, because Ray would resolve a bare one before the call, and delay
        later calls.
        """
        import ray

        return ray.get(weights[0])


def _actor_class(ray: Any, actors: Actors) -> Any:
    """Returns the class of actors, with a thread per lane and one for all other methods."""
    worker: Any = find_callable(actors.kind)
    actor: Any = type(f"TorchBeast{worker.__name__}", (_OnRay, worker), {})
    for name, lane in worker.LANES.items():
        ray.method(concurrency_group=lane)(getattr(actor, name))
    groups = {lane: 1 for lane in worker.LANES.values()}
    return ray.remote(concurrency_groups=groups, max_restarts=0)(actor)


@contextmanager
def _own_files() -> Iterator[Path]:
    """Makes a folder for the files of a Ray that is started here: logs, sockets, spilled objects.

    It contains a token that is required to use that Ray. By default Ray leaves its token in the
    home folder, and then every later cluster of the user requires it too.
    """
    parent = tempfile.gettempdir()
    parent = parent if len(parent) + len("/torchbeast-ray-") < _LONGEST_FOLDER else "/tmp"
    made = tempfile.TemporaryDirectory(
        prefix="torchbeast-ray-", dir=parent, ignore_cleanup_errors=True
    )
    with made as folder:
        ours: dict[str, str] = {}
        if not any(name in os.environ for name in _OF_TOKENS):
            token = Path(folder, "token")
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
            ours = dict(zip(_OF_TOKENS, ("token", str(token)), strict=True))
        os.environ.update(ours)
        _read_token_again()
        try:
            yield Path(folder)
        finally:
            for name in ours:
                os.environ.pop(name, None)
            _read_token_again()


def _read_token_again() -> None:
    """Lets Ray read its token anew: it keeps the first that it has read in a process."""
    raylet: Any = sys.modules.get("ray._raylet")
    with suppress(AttributeError):  # Ray is not imported yet, or is a release without tokens
        raylet.Config.initialize("")  # first: a thread that still ends may ask for the token
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _node(node: Mapping[str, Any], here: str) -> Node:
    has = node["Resources"]
    return Node(
        host=node["NodeManagerAddress"],
        cpus=has.get("CPU", 0.0),
        gpus=has.get("GPU", 0.0),
        is_learners=node["NodeID"] == here,
        object_store_bytes=has.get("object_store_memory", 0.0),
    )


def _visible_gpus() -> list[str]:
    import ray

    return [str(number) for number in ray.get_gpu_ids()]
