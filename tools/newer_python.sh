#!/usr/bin/env bash
# Finds a Python that the newest JAX runs on, 3.12 or newer, and prints its path: $PYTHON if that is set, else one on
# PATH, else Debian's next release unpacked into a folder, with its own C library: nothing of the system changes.
#
#   tools/newer_python.sh DIR
#
# Unpacking takes a minute and 100 MB, and apt; what lies in DIR already is used again.
set -euo pipefail
dir=${1:?wanted a folder to unpack a Python into}
suite=${SUITE:-stable} # of the mirror that apt uses

fail() {
  printf 'newer_python.sh: %s\n' "$1" >&2
  echo 'The newest JAX needs Python 3.12 or newer. Install one with its venv module, or name it: make PYTHON=... test-newest' >&2
  exit 1
}

# The path of an interpreter that will do, as it names itself: what is found on PATH may be a launcher of others.
path_of() {
  "$1" -c 'import ctypes, ensurepip, ssl, sys, venv; assert sys.version_info >= (3, 12); print(sys.executable)' 2>/dev/null
}

unpack() {
  local tool mirror libraries loader python
  for tool in apt-get dpkg-deb gpgv; do
    command -v "$tool" >/dev/null || fail "found no Python 3.12 or newer on PATH, and no $tool to unpack one with"
  done
  mirror=$(. /etc/os-release && apt-get update --print-uris |
    sed -n "s|^'\(.*\)dists/${VERSION_CODENAME:-none}/InRelease'.*|\1|p" | head -n 1)
  [ -n "$mirror" ] || fail "found no Python 3.12 or newer on PATH, and no mirror of this system's release in apt's sources"

  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work"/{lists,archives}/partial "$dir"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$work/sources.list"
  : >"$work/status" # nothing is installed, so apt takes all that a Python needs, down to the C library
  local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State=$work" -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status"
    -o "Dir::Cache=$work" -o "Dir::Cache::archives=$work/archives" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
  "${apt[@]}" update
  "${apt[@]}" install --yes --download-only --no-install-recommends python3-venv patchelf
  for deb in "$work"/archives/*.deb; do dpkg-deb -x "$deb" "$dir"; done

  # Programs find their libraries in the folder; ensurepip, what it installs.
  python=$(readlink -f "$dir/usr/bin/python3")
  libraries=$(dirname "$(ls "$dir"/usr/lib/*/libc.so.6)")
  loader=$(ls "$libraries"/ld-linux*.so.* | head -n 1)
  "$loader" --library-path "$libraries" "$dir/usr/bin/patchelf" --set-interpreter "$loader" \
    --set-rpath "$libraries" --force-rpath --no-sort "$python" # sorted, what patchelf 0.18 writes does not start
  sed -i "s|'/usr/share/python-wheels/'|'$dir/usr/share/python-wheels/'|" "$dir"/usr/lib/python3.*/_sysconfigdata_*.py
  find "$dir" -xtype l -delete # links into a system that is not here
}

if [ -n "${PYTHON:-}" ]; then
  path_of "$PYTHON" || fail "PYTHON: wanted a Python 3.12 or newer with its venv module, got $PYTHON"
  exit
fi
for candidate in python3 python3.13 python3.12 python3.14; do
  path_of "$candidate" && exit
done
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
if [ ! -e "$dir/unpacked" ]; then
  unpack >&2
  touch "$dir/unpacked"
fi
path_of "$dir/usr/bin/python3" || fail "the Python in $dir does not run: remove that folder, and try again"
