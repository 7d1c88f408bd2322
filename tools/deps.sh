#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/deps.sh build|run|test|format|check|docs: makes sure that what a make target needs is on this machine. Missing Debian
# packages are installed as root or through a sudo that asks no password, ruff by pip in .venv; where that is not possible, or
# WEFT_INSTALL_DEPS is 0, they are named. A browser, which one test takes, and what builds the documentation site (the versions
# of tools/docs-requirements.txt, in .venv) are installed for tests where they can be and otherwise done without.
set -eu
cd "$(dirname "$0")/.."

missing=
optional=
need_command() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need_header() { echo "#include <$1>" | "${CC:-cc}" -E -x c - >/dev/null 2>&1 || missing="$missing $2"; }
need_library() {
    { command -v ldconfig >/dev/null 2>&1 && ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -q "$1" ||
        missing="$missing $2"
}
need_python() { python3 -c "$1" >/dev/null 2>&1 || missing="$missing $2"; }
# The one version that pyproject.toml asks for, from .venv or the path.
ruff_version() { sed -n 's/^required-version = "==\(.*\)"$/\1/p' pyproject.toml; }
has_ruff() { PATH=.venv/bin:$PATH ruff --version 2>/dev/null | grep -qx "ruff $(ruff_version)"; }
# What tools/docs-requirements.txt names, as .venv has it.
has_docs() {
    [ -x .venv/bin/python ] && .venv/bin/python - <<'END' >/dev/null 2>&1
from importlib.metadata import version
for line in open("tools/docs-requirements.txt"):
    name, _, wanted = line.strip().partition("==")
    assert not wanted or version(name) == wanted
END
}
want_browser() {
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$name" >/dev/null 2>&1; then return; fi
    done
    optional=" chromium"
}
need_clang_link() {
    echo 'int main(void) { return 0; }' | clang "$1" -x c -o /dev/null - >/dev/null 2>&1 || missing="$missing $2"
}

find_missing() {
    missing= optional=
    if [ "$1" = docs ]; then
        need_command python3 python3
        has_docs || need_python 'import venv, ensurepip' python3-venv
        return
    fi
    if [ "$1" = format ]; then
        need_command clang-format clang-format
        has_ruff || need_python 'import venv, ensurepip' python3-venv
        return
    fi
    need_command "${CC:-cc}" gcc
    need_command cmake cmake
    need_command ninja ninja-build
    need_header stdio.h libc6-dev
    if [ "$1" = build ]; then return; fi
    # Training loads a BLAS when it begins; the variant with OpenMP shares its threads with the library's own.
    need_library libopenblas.so.0 libopenblas0-openmp
    if [ "$1" = run ]; then return; fi
    need_command mpirun openmpi-bin
    need_command c++ g++
    need_command nm binutils
    need_command python3 python3
    # The extension is compiled against Python's headers, and its tests may need an environment of their own.
    need_python 'import sysconfig, os; assert os.path.exists(sysconfig.get_paths()["include"] + "/Python.h")' python3-dev
    need_python 'import venv, ensurepip' python3-venv
    need_command pkg-config pkg-config
    need_header cmocka.h libcmocka-dev
    want_browser
    if [ "$1" = test ]; then return; fi
    need_command clang clang
    need_command clang-format clang-format
    need_command llvm-symbolizer llvm
    # clang's OpenMP and sanitizer runtimes are packages of their own.
    need_clang_link -fopenmp=libomp libomp-dev
    if command -v clang >/dev/null 2>&1; then
        need_clang_link -fsanitize=thread "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev"
    fi
}

# Prints how to become root without being asked for a password; fails where there is no way.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        echo env
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        echo sudo env
    else
        return 1
    fi
}

# shellcheck disable=SC2086
install_packages() {
    [ "${WEFT_INSTALL_DEPS:-1}" != 0 ] || return 1
    command -v apt-get >/dev/null 2>&1 && root=$(as_root) || return 1
    echo "Installing Debian packages:$1"
    $root apt-get -qq -o DPkg::Lock::Timeout=300 update || true
    $root DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install \
        --no-install-recommends $1 >/dev/null
}

install_ruff() {
    if [ "${WEFT_INSTALL_DEPS:-1}" != 0 ]; then
        echo "Installing ruff $(ruff_version) in .venv"
        [ -x .venv/bin/python ] || python3 -m venv .venv
        .venv/bin/python -m pip -q install "ruff==$(ruff_version)" && has_ruff && return
    fi
    echo "Missing on this machine, please install (a Python package): ruff==$(ruff_version)" >&2
    exit 1
}

# Fails where it cannot be done.
install_docs() {
    [ "${WEFT_INSTALL_DEPS:-1}" != 0 ] || return 1
    echo "Installing MkDocs and its theme in .venv"
    [ -x .venv/bin/python ] || python3 -m venv .venv || return 1
    .venv/bin/python -m pip -q --retries 1 --timeout 20 install -r tools/docs-requirements.txt && has_docs
}

finish() {
    case "$1" in docs | test | check)
        if ! has_docs && ! install_docs; then
            echo "Missing on this machine (Python packages of tools/docs-requirements.txt): the documentation site cannot be built" >&2
            [ "$1" != docs ] || exit 1
        fi
        ;;
    esac
    if [ -n "$optional" ] && ! install_packages "$optional"; then
        echo "Missing on this machine, done without (names of Debian packages):$optional" >&2
    fi
    [ "$1" != format ] || has_ruff || install_ruff
    exit 0
}

# Twice, because some packages can be named only when others are there.
for _ in 1 2; do
    find_missing "$1"
    [ -z "$missing" ] && finish "$1"
    install_packages "$missing" || break
done
find_missing "$1"
[ -z "$missing" ] && finish "$1"
# Training works without a BLAS, only slower, and says so itself.
[ "$1" = run ] && [ "$missing" = " libopenblas0-openmp" ] && exit 0

echo "Missing on this machine, please install (names of Debian packages):$missing" >&2
exit 1
