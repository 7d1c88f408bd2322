#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tests/golden.sh <program>: compares both backends with the golden files, which live outside the repository.
set -eu
program=$1
golden=${WEFT_GOLDEN_DIR:-$(dirname "$0")/../../shared/golden}
if [ ! -d "$golden" ]; then
    echo "Golden files: skipped, there is no ../shared/golden and WEFT_GOLDEN_DIR is not set."
    exit 77
fi
for backend in ref cpu; do
    echo "Golden files on the backend $backend:"
    "$program" check --golden "$golden" --backend "$backend"
done
