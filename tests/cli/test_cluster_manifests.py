# SPDX-License-Identifier: Apache-2.0
"""The commands in examples/cluster have flags that the programs take, and agree with each other."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastEnvFlags, PolyBeastLearnerFlags
from torchbeast.keys import KeysFlags

yaml = pytest.importorskip("yaml")

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
PROGRAMS: dict[str, type[Any]] = {
    "polybeast_env": PolyBeastEnvFlags,
    "polybeast_learner": PolyBeastLearnerFlags,
    "keys": KeysFlags,
}
IMAGE_PYTHON = "/opt/torchbeast/bin/python"


def parsed(words: Sequence[str]) -> tuple[str, Any]:
    """Returns the program that a command starts, and its flags as the program parses them."""
    module = words[words.index("-m") + 1]
    program = module.removeprefix("torchbeast.")
    args = list(words[words.index("-m") + 2 :])
    return program, parse(PROGRAMS[program], program, args)


def of_compose() -> Iterator[list[str]]:
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    for service in services.values():
        if service["image"] == "torchbeast":
            yield [*service["entrypoint"], *service["command"]]


def of_kubernetes() -> Iterator[list[str]]:
    for resource in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()):
        for container in containers(resource):
            words = [*container["command"], *container["args"]]
            yield unwrapped(words)


def containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    spec = resource.get("spec", {}).get("template", {}).get("spec", {})
    return spec.get("containers", [])


def unwrapped(words: list[str]) -> list[str]:
    """Returns the command of ours that a shell runs, with its arguments in place of "$@"."""
    if words[:2] != ["sh", "-c"]:
        return words
    (line,) = (line for line in words[2].splitlines() if IMAGE_PYTHON in line)
    inner = shlex.split(line.removesuffix("&"))
    given = [word for word in inner[inner.index(IMAGE_PYTHON) :] if word != "$@"]
    return [*given, *words[4:]]


STAND_IN = f"""#!{sys.executable} -IS
import os, signal, sys

def wait_for_sigterm(code):
    # The caller has blocked SIGTERM, so one that comes early is not lost.
    print("ready", flush=True)
    signal.sigwait({{signal.SIGTERM}})
    sys.exit(code)

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
"""

SLURM_STAND_IN = f"""{STAND_IN}
notes = os.environ["NOTES"]

def note(line):
    with open(notes, "a") as file:
        file.write(line + "\\n")

match name, words:
    case "srun", _:
        command = next(i for i, word in enumerate(words) if not word.startswith("--"))
        os.execvp(words[command], words[command:])
    case "scontrol", ["show", *_]:
        print("node1", "node2", "node3", sep="\\n")
    case "scontrol", _:
        note(" ".join(words))
    case "scancel", _:
        note(words[-1])
    case "python", [_, module, *_]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
        with open(f"{{notes}}.{{module}}", "w") as file:
            file.write("\\0".join(words))
        if module == "torchbeast.keys":
            os.mkdir(words[-1])
            open(f"{{words[-1]}}/ca-key.pem", "w").close()
        elif "EXIT_CODE" not in os.environ:  # each end of the pipe waits for the other
            mode = "w" if module == "torchbeast.polybeast_env" else "r"
            open(os.environ["SERVING"], mode).close()
        elif module == "torchbeast.polybeast_learner":
            wait_for_sigterm(int(os.environ["EXIT_CODE"]))
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def slurm_job(folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Starts slurm.sh with a stand-in for Slurm's commands and for Python, which notes its words.

    If `environment` has an EXIT_CODE, the learner waits for SIGTERM and exits with that code;
    otherwise it exits once the servers have started.
    """
    for name in ("srun", "scontrol", "scancel", "python"):
        write_program(folder / name, SLURM_STAND_IN)
    os.mkfifo(folder / "serving")
    ours = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "NOTES": str(folder / "notes"),
        "SERVING": str(folder / "serving"),
        "TORCHBEAST_SAVEDIR": str(folder / "runs"),
    }
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NAME": "torchbeast"}
    return subprocess.Popen(
        ["bash", str(CLUSTER / "slurm.sh")],
        env={**os.environ, **ours, **slurm, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def of_slurm(folder: Path) -> list[list[str]]:
    """Returns the commands of a job whose learner ends, and with it the job."""
    job = slurm_job(folder)
    job.communicate(timeout=60)
    assert job.returncode == 0
    notes = [path.read_text().split("\0") for path in folder.glob("notes.*")]
    return [["python", *words] for words in notes]


@pytest.mark.parametrize(
    ("sent", "code", "said_to_slurm"),
    [
        (signal.SIGUSR1, 0, ["7.0", "requeue 7"]),
        (signal.SIGUSR1, 1, ["7.0"]),
        (signal.SIGTERM, 0, ["7.0"]),
    ],
)
def test_a_slurm_job_goes_back_into_the_queue_if_its_time_is_over_and_it_has_its_checkpoint(
    tmp_path: Path, sent: signal.Signals, code: int, said_to_slurm: list[str]
) -> None:
    """scancel sends SIGTERM: who cancels a job does not want it back."""
    job = slurm_job(tmp_path, EXIT_CODE=str(code))
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    (keys,) = (tmp_path / "runs").glob("keys-*")
    assert not (keys / "ca-key.pem").exists(), "it could make certificates that all trust"
    job.send_signal(sent)
    assert job.wait(30) == code
    assert (tmp_path / "notes").read_text().splitlines() == said_to_slurm
    assert not keys.exists(), "the job's keys end with it"


def test_the_commands_of_docker_compose_are_ones() -> None:
    found = [parsed(words) for words in of_compose()]
    assert [name for name, _ in found] == ["polybeast_env", "polybeast_learner"]
    agree(dict(found), "compose.yaml")


def test_the_commands_of_kubernetes_are_ones() -> None:
    found = [parsed(words) for words in of_kubernetes()]
    assert [name for name, _ in found] == ["polybeast_env", "polybeast_learner"]
    agree(dict(found), "kubernetes.yaml")


def test_the_commands_of_slurm_are_ones(tmp_path: Path) -> None:
    found = dict(map(parsed, of_slurm(tmp_path)))
    assert set(found) == {"keys", "polybeast_env", "polybeast_learner"}
    assert found["keys"].hosts == "node1"
    assert found["polybeast_env"].servers.learner == "node1:50050"
    assert_all_are_learnt_from(found)
    assert found["polybeast_learner"].fleet.listen == "0.0.0.0:50050"
    assert found["polybeast_learner"].security.tls_client_ca.endswith("/keys-7/ca.pem")
    assert found["polybeast_env"].security.token_file.endswith("/keys-7/token")
    assert not list((tmp_path / "runs").glob("keys-*")), "the job's keys end with it"


def agree(flags: dict[str, Any], file: str) -> None:
    """Checks what one program's command says of another's."""
    servers, learner = flags["polybeast_env"], flags["polybeast_learner"]
    made = re.search(r"torchbeast.keys .*--hosts (\S+)", (CLUSTER / file).read_text())
    assert made is not None
    assert servers.servers.learner == f"{made[1]}:50050"
    assert learner.fleet.listen == "0.0.0.0:50050"
    assert_all_are_learnt_from(flags)
    of_learner, of_servers = yaml.safe_load((CLUSTER / "prometheus.yaml").read_text())[
        "scrape_configs"
    ]
    assert of_learner["static_configs"] == [{"targets": ["learner:9400"]}]
    assert learner.metrics.metrics_port == "0.0.0.0:9400"
    assert of_servers["dns_sd_configs"] == [{"names": ["environments"], "type": "A", "port": 9401}]
    assert servers.metrics.metrics_port == "0.0.0.0:9401"
    assert not learner.security.insecure and not servers.security.insecure


def assert_all_are_learnt_from(flags: dict[str, Any]) -> None:
    """The learner counts the environments of all hosts, unless it is told a number."""
    assert flags["polybeast_learner"].fleet.num_envs is None


def test_the_keys_that_containers_read_are_given_to_them() -> None:
    """A host must not get the key of the learner."""
    secrets = {
        "torchbeast-learner": {"token", "server.pem", "server-key.pem"},
        "torchbeast-hosts": {"ca.pem", "token"},
    }
    text = (CLUSTER / "kubernetes.yaml").read_text()
    header = re.sub(r"\\\n#\s+", "", text)
    for name, files in secrets.items():
        (made,) = re.findall(rf"create secret generic {name} (.*)", header)
        assert set(re.findall(r"--from-file=keys/(\S+)", made)) == files
    for resource in yaml.safe_load_all(text):
        for container in containers(resource):
            (volume,) = (
                v for v in resource["spec"]["template"]["spec"]["volumes"] if v["name"] == "keys"
            )
            used = set(re.findall(r"/keys/([\w.-]+)", str(container)))
            assert used and used <= secrets[volume["secret"]["secretName"]]
            assert volume["secret"]["defaultMode"] == 0o440


def test_the_wrapper_of_the_learner_says_whether_it_was_stopped(tmp_path: Path) -> None:
    """A Job takes the exit code 0 for the end of the run."""
    (wrapper,) = (
        container["command"]
        for resource in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
        for container in containers(resource)
        if container["name"] == "learner"
    )
    python = tmp_path / "python"
    write_program(
        python,
        f"""{STAND_IN}
if words[2] != "wait":
    sys.exit(int(words[2]))
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
wait_for_sigterm(0)
""",
    )
    words = [word.replace(IMAGE_PYTHON, str(python)) for word in wrapper]
    for given in ("0", "1", "2"):
        assert subprocess.run([*words, given], check=False, timeout=30).returncode == int(given)
    running = subprocess.Popen([*words, "wait"], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    running.terminate()
    assert running.wait(30) == 75


def test_the_alert_about_streams_sees_hosts_that_dial_in() -> None:
    """Their streams are forgotten when they leave, so that none counts as lost."""
    (group,) = yaml.safe_load((CLUSTER / "alerts.yaml").read_text())["groups"]
    (away,) = (rule for rule in group["rules"] if rule["alert"] == "TorchBeastStreamsAreAway")
    assert 'state="live"' in away["expr"] and "lost" not in away["expr"]


def test_the_alert_about_lost_servers_lasts_until_they_are_back() -> None:
    (group,) = yaml.safe_load((CLUSTER / "alerts.yaml").read_text())["groups"]
    (lost,) = (rule for rule in group["rules"] if rule["alert"] == "TorchBeastStreamsAreLost")
    assert lost["expr"] == 'torchbeast_streams{state="lost"} > 0'


@pytest.mark.parametrize("name", [".dockerignore", ".gitignore"])
def test_keys_are_neither_built_into_images_nor_committed(name: str) -> None:
    made = re.search(r"torchbeast.keys .*--folder (\S+)", (CLUSTER / "compose.yaml").read_text())
    assert made is not None
    lines = (CLUSTER.parents[1] / name).read_text().split()
    keys = {KeysFlags.folder, f"examples/cluster/{made[1]}"}
    assert keys <= {line.strip("/") for line in lines}
