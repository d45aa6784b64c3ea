#!/usr/bin/env bash
# Installs what is missing to build narrowfloat on Debian 12, and nothing else:
#
#     tools/setup.sh            what the build needs
#     tools/setup.sh --tests    also what tests and lint need, with a Python environment in .venv
#     tools/setup.sh --torch    as --tests, and .venv-torch with PyTorch (several GB) for ./test.sh
#                               --with-torch
#     tools/setup.sh --engines  as --tests, and .venv-engines with vLLM and SGLang (9 GB) for
#                               ./test.sh --with-engines
#     tools/setup.sh --long     also what tools/long_tests.sh needs: clang with libFuzzer
#
# Safe to run again; does nothing and needs no network when nothing is missing. Programs found on
# PATH are taken as they are, whoever installed them.
set -euo pipefail
cd "$(dirname "$0")/.."

with_tests=false with_torch=false with_engines=false with_long=false
case "${1:-}" in
  "") ;;
  --tests) with_tests=true ;;
  --torch) with_tests=true with_torch=true ;;
  --engines) with_tests=true with_engines=true ;;
  --long) with_long=true ;;
  *)
    echo "usage: tools/setup.sh [--tests | --torch | --engines | --long]" >&2
    exit 2
    ;;
esac

missing=()

# need_program PROGRAM PACKAGE...: the packages are missing if the program is not on PATH.
need_program() {
  command -v "$1" > /dev/null || missing+=("${@:2}")
}

# need_package PACKAGE...: Debian packages that have no program to look for.
need_package() {
  local package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' \
      || missing+=("$package")
  done
}

need_program g++ g++
need_program cmake cmake
need_program ninja ninja-build
need_program python3 python3
if command -v dpkg-query > /dev/null; then
  need_package libtbb-dev libcli11-dev nlohmann-json3-dev libfmt-dev libxxhash-dev
fi
if $with_tests; then
  need_program git git
  need_program ccache ccache
  need_program pkg-config pkgconf
  need_program clang-format-14 clang-format-14
  need_program clang-tidy-14 clang-tidy-14
  python3 -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
  # For the extension module of the Python package.
  headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))' || true)
  [ -f "$headers/Python.h" ] || missing+=(python3-dev)
  if command -v dpkg-query > /dev/null; then
    need_package libgtest-dev librapidcheck-dev
  fi
fi

if $with_long; then
  need_program clang++-14 clang-14
  need_program ccache ccache
  if command -v dpkg-query > /dev/null; then
    need_package libgtest-dev librapidcheck-dev libclang-rt-14-dev
  fi
fi

if [ "${#missing[@]}" -gt 0 ]; then
  if ! command -v apt-get > /dev/null; then
    echo "setup: no apt-get here; install the equivalents of: ${missing[*]}" >&2
    exit 1
  fi
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo > /dev/null; then
      echo "setup: not root and no sudo; as root: apt-get install ${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  echo "setup: installing Debian packages: ${missing[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends "${missing[@]}"
fi

# python_environment FOLDER LIST...: a virtual environment with the packages of the lists. It is as
# old as the lists it was made from: a changed list remakes it.
python_environment() {
  local folder=$1 list options=()
  shift
  for list in "$@"; do
    options+=(-r "$list")
  done
  local made_from=$folder/${list##*/}
  if cat "$@" | cmp -s - "$made_from"; then
    return
  fi
  echo "setup: making the Python environment $folder from $*"
  python3 -m venv --clear "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check "${options[@]}"
  cat "$@" > "$made_from"
}

if $with_tests; then
  python_environment .venv tools/requirements-test.txt
fi
if $with_torch; then
  python_environment .venv-torch tools/requirements-test.txt tools/requirements-torch.txt
fi
if $with_engines; then
  python_environment .venv-engines tools/requirements-engines.txt
  # SGLang pins other versions of what vLLM pins; its classes for experts run with vLLM's.
  if ! cmp -s tools/requirements-sglang.txt .venv-engines/requirements-sglang.txt; then
    .venv-engines/bin/pip install --quiet --disable-pip-version-check --no-deps \
      -r tools/requirements-sglang.txt
    cp tools/requirements-sglang.txt .venv-engines
  fi
fi
