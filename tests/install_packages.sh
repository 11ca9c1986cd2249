#!/usr/bin/env bash
# Installs the Debian packages of tests/packages.txt that are missing, where we may; says so where we may not.
set -euo pipefail
cd "$(dirname "$0")"
mapfile -t wanted < <(sed 's/#.*//; s/[[:space:]]*$//; /^$/d' packages.txt)
missing=()
for package in "${wanted[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ]; then
    echo "not root: tests that need them are skipped. To have them: sudo apt-get install ${missing[*]}" >&2
    exit 0
fi
echo "installing for the tests: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Daemons belong to the tests, not to this machine: do not let packages start them.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
