#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the missing ones of these Debian or Ubuntu packages, as root or with sudo.
# usage: scripts/install_system_packages.sh PACKAGE...
set -euo pipefail

installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }

if ! command -v apt-get >/dev/null; then
  echo "This is not Debian or Ubuntu: install the system packages yourself (docs/how-to/install.md" >&2
  echo "names those of macOS). Continuing as if they were installed." >&2
  exit 0
fi

missing=()
for package in "$@"; do
  installed "$package" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "These packages are needed, but this user is not root and there is no sudo. As root, run:" >&2
    echo "  apt-get install ${missing[*]}" >&2
    exit 1
  fi
  sudo=(sudo)
fi
echo "Installing system packages: ${missing[*]}"
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
