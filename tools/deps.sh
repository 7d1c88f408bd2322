#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/deps.sh build|test|format|check: makes sure that what a make target needs is on this machine. Missing Debian
# packages are installed as root or through a sudo that asks no password; where that is not possible they are named.
set -eu

missing=
need_command() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need_header() { echo "#include <$1>" | "${CC:-cc}" -E -x c - >/dev/null 2>&1 || missing="$missing $2"; }

find_missing() {
    missing=
    if [ "$1" = format ]; then
        need_command clang-format clang-format
        return
    fi
    need_command "${CC:-cc}" gcc
    need_command cmake cmake
    need_command ninja ninja-build
    need_header stdio.h libc6-dev
    if [ "$1" = build ]; then return; fi
    need_command c++ g++
    need_command nm binutils
    need_command python3 python3
    need_command pkg-config pkg-config
    need_header cmocka.h libcmocka-dev
    if [ "$1" = test ]; then return; fi
    need_command clang clang
    need_command clang-format clang-format
    need_command llvm-symbolizer llvm
    # clang's own OpenMP and sanitizer runtimes, which gcc's do not replace.
    if ! echo 'int main(void) { return 0; }' | clang -fopenmp=libomp -x c -o /dev/null - 2>/dev/null; then
        missing="$missing libomp-dev"
    fi
}

find_missing "$1"
[ -z "$missing" ] && exit 0

if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then
        as_root=env
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo env"
    else
        as_root=
    fi
    if [ -n "$as_root" ]; then
        echo "Installing Debian packages:$missing"
        $as_root apt-get -qq -o DPkg::Lock::Timeout=300 update || true
        # shellcheck disable=SC2086
        $as_root DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 \
            install --no-install-recommends $missing >/dev/null
        find_missing "$1"
        [ -z "$missing" ] && exit 0
    fi
fi

echo "Missing on this machine, please install (names of Debian packages):$missing" >&2
exit 1
