# SPDX-License-Identifier: Apache-2.0
"""Makes the files that protect PolyBeast across machines: an authority, certificates, a token.

python -m torchbeast.keys --hosts actors1.lab,actors2.lab,10.0.0.7      that the learner connects to
python -m torchbeast.keys --hosts learner.lab                           to which hosts dial in

Needs the package cryptography: pip install 'torchbeast[tls]'.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchbeast.cli.command_line import parse
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of, expanded, refusing_paths
from torchbeast.keys.config import KeysConfig, KeysFlags

if TYPE_CHECKING:
    from torchbeast.keys.certificates import Pair

PROGRAM = "keys"
_PORT = 50051  # of the commands that are shown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when the files are there, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(KeysFlags, PROGRAM, argv).keys))


def run(config: KeysConfig) -> int:
    """Writes the files and prints what goes where."""
    _check_installed()
    from torchbeast.keys import certificates

    hosts = [host.strip() for host in config.hosts.split(",") if host.strip()]
    if not hosts:
        raise UsageError("give --hosts: the names of machines that listen, such as actors1.lab")
    names, folder = certificates.names_of(hosts), _made_folder(config.folder)
    authority = _authority(folder)
    _write_pair(folder, "server", certificates.new_server(authority, names, config.days))
    _write_pair(folder, "client", certificates.new_client(authority, config.days))
    if not (folder / "token").exists():
        _write(folder / "token", f"{secrets.token_urlsafe(32)}\n".encode())
    print(_what_goes_where(folder, hosts, config.days))
    return EXIT_DONE


def _check_installed() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError(
            "certificates are made with the package cryptography, which is not installed: "
            "pip install 'torchbeast[tls]'"
        )


def _made_folder(name: str) -> Path:
    with refusing_paths("give another --folder"):
        folder = expanded(name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _authority(folder: Path) -> Pair:
    """Returns the authority of the folder, which is made if there is none."""
    from torchbeast.keys import certificates

    paths = folder / "ca.pem", folder / "ca-key.pem"
    if not any(path.exists() for path in paths):
        made = certificates.new_authority()
        _write_pair(folder, "ca", made)
        return made
    try:
        found = certificates.pair_from_pem(*(path.read_bytes() for path in paths))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{paths[0]} and {paths[1]} are no authority that can be used again ({error}): give "
            "another --folder"
        ) from None
    if certificates.is_over(found):
        raise UsageError(
            f"the authority {paths[0]} has expired, and everything that it signs: give another "
            "--folder, and take the new ca.pem to every machine"
        )
    return found


def _write_pair(folder: Path, name: str, pair: Pair) -> None:
    _write(folder / f"{name}.pem", pair.certificate_pem())
    _write(folder / f"{name}-key.pem", pair.key_pem())


def _write(path: Path, content: bytes) -> None:
    """Replaces a file atomically by one that only this user can read."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}): give another --folder") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _what_goes_where(folder: Path, hosts: Sequence[str], days: int) -> str:
    asked = shlex.quote(",".join(f"{_in_address(host)}:{_PORT}" for host in hosts))
    learner = shlex.quote(f"{_in_address(hosts[0])}:{_PORT}")
    return f"""\
The files are in {folder}, for its owner only. Copy, over a connection that you trust (scp):
  to machines of environment servers   server.pem server-key.pem ca.pem token
  to the machine of the learner        client.pem client-key.pem ca.pem token
  nowhere                              ca-key.pem: whoever has it can make certificates

On each of {", ".join(hosts)}, in the folder with these files:
  python -m torchbeast.polybeast_env --listen 0.0.0.0:{_PORT} --tls_cert server.pem \\
      --tls_key server-key.pem --tls_client_ca ca.pem --token_file token
For the learner:
  python -m torchbeast.polybeast_learner --env_servers {asked} --tls_ca ca.pem \\
      --tls_cert client.pem --tls_key client-key.pem --token_file token
If {hosts[0]} is the learner's machine, to which hosts dial in, the two sides change places:
  python -m torchbeast.polybeast_learner --listen 0.0.0.0:{_PORT} --tls_cert server.pem \\
      --tls_key server-key.pem --tls_client_ca ca.pem --token_file token
  python -m torchbeast.polybeast_env --learner {learner} --tls_ca ca.pem \\
      --tls_cert client.pem --tls_key client-key.pem --token_file token
The certificates are valid for {days} days; this command makes new ones of the same authority."""


def _in_address(host: str) -> str:
    """Returns the host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


if __name__ == "__main__":
    sys.exit(main())
