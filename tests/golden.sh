#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tests/golden.sh <program>: compares every backend this machine can run with the golden files, which live outside the repository.
set -eu
program=$1
golden=${WEFT_GOLDEN_DIR:-$(dirname "$0")/../../shared/golden}
if [ ! -d "$golden" ]; then
    echo "Golden files: skipped, there is no ../shared/golden and WEFT_GOLDEN_DIR is not set."
    exit 77
fi
"$program" check --golden "$golden"
