#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tests/records.sh <work folder>: the tools around GPU records, on a record made up here.
set -eu
tools=$(dirname "$0")/../tools
mkdir -p "$1"
record=$1/gpu.jsonl
picture=$1/gpu.svg

python3 - "$record" <<'END'
import json
import sys

row = {"part": "bench", "suite": "te", "pass": "fwd", "streams": 4, "dtype": "bf16", "layout": "nc", "us": 12.5,
       "gbps": 3000.0, "of_copy": 0.7, "copy_gbps": 4270.0}
lines = [{"record": "gpu", "gpu": "A <GPU> & more", "version": "0.1.0", "date": "2026-01-01"}]
lines += [{**row, "op": op, "tokens": tokens, "channels": 4096, "of_copy": share}
          for op, share in (("mhc_post", 0.97), ("mhc_project", 0.02), ("rmsnorm", 1.4)) for tokens in (2048, 8192)]
lines.append({"part": "bench", "suite": "te", "result": "passed", "rows": 6, "seconds": 1.0})
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.writelines(json.dumps(line) + "\n" for line in lines)
END

"$tools/plot_bench.py" "$record" --out "$picture"
python3 -c "import sys, xml.dom.minidom as m; assert len(m.parse(sys.argv[1]).getElementsByTagName('g')) == 6" "$picture"
if "$tools/plot_bench.py" "$record" --suite small >/dev/null 2>&1; then
    echo "plot_bench.py draws a suite that is not there" >&2
    exit 1
fi

one=$("$tools/source_hash.py")
[ "$one" = "$("$tools/source_hash.py")" ] && [ ${#one} = 64 ]
"$tools/gpu_record.py" --verify
