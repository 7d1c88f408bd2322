#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tests/golden.sh <program>: compares every backend this machine can run with the golden files in WEFT_GOLDEN_DIR. They are not part
# of the repository.
set -eu
program=$1
golden=${WEFT_GOLDEN_DIR:-}
if [ -z "$golden" ]; then
    echo "Golden files: skipped, WEFT_GOLDEN_DIR is not set."
    exit 77
fi
"$program" check --golden "$golden"
