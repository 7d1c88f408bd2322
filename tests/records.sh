#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tests/records.sh <work folder>: the tools around records of GPUs and of fuzzing, on records made up here.
set -eu
tools=$(dirname "$0")/../tools
mkdir -p "$1"
record=$1/gpu.jsonl
picture=$1/gpu.svg

python3 - "$record" <<'END'
import json
import sys

row = {"part": "bench", "suite": "te", "pass": "fwd", "streams": 4, "dtype": "bf16", "layout": "nc", "us": 12.5,
       "gbps": 3000.0, "of_copy": 0.7, "copy_gbps": 4270.0, "preset": "liger", "cache": "flushed"}
lines = [{"record": "gpu", "gpu": "A <GPU> & more", "version": "0.1.0", "date": "2026-01-01", "capability": "9.0",
          "driver": "1.2", "cuda": "3.4", "command": "make gpu-record"}]
lines += [{**row, "op": op, "tokens": tokens, "channels": 4096, "of_copy": share}
          for tokens in (2048, 8192, 8192)  # two batches of one shape
          for op, share in (("mhc_post", 0.97), ("mhc_project", 0.02), ("rmsnorm", 1.4))]
lines.append({"part": "bench", "suite": "te", "result": "passed", "rows": 9, "seconds": 1.0})
lines += [{**row, "suite": "all", "op": "rmsnorm", "pass": name, "tokens": 64, "channels": 128, "us": us}
          for name, us in (("fwd", 5.04), ("bwd", 123.6))]
lines[-1]["us_sustained"] = 130.4
lines[-2]["us_sustained"] = 5.1
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.writelines(json.dumps(line) + "\n" for line in lines)
END

"$tools/plot_bench.py" "$record" --out "$picture"
python3 -c "import sys, xml.dom.minidom as m; assert len(m.parse(sys.argv[1]).getElementsByTagName('g')) == 9" "$picture"
if "$tools/plot_bench.py" "$record" --suite small >/dev/null 2>&1; then
    echo "plot_bench.py draws a suite that is not there" >&2
    exit 1
fi

"$tools/gpu_table.py" "$record" >"$1/tables.md"
for line in '| tokens x channels | `mhc_post` fwd | `mhc_project` fwd | `rmsnorm` fwd |' \
    '| 2048 x 4096 | 12.5 (97 %) | 12.5 (2 %) | 12.5 (140 %) |' '| `rmsnorm` | 5.0 | 70 % | 124 | 70 % |' \
    'From 100 us on, runs after the first twenty took more than 2 % longer, in microseconds: `rmsnorm` bwd at 64 x 128 130.' \
    'Compute capability 9.0; driver 1.2; CUDA 3.4; weft 0.1.0, `make gpu-record`, 2026-01-01.'; do
    grep -qxF -- "$line" "$1/tables.md" || { echo "gpu_table.py lacks: $line" >&2; exit 1; }
done
[ "$(grep -c '^| 8192 x 4096 |' "$1/tables.md")" = 2 ]
cp "$tools/../docs/performance.md" "$1/performance.md"
for _ in 1 2; do # what is there is replaced, what is around it stays
    "$tools/gpu_table.py" --write "$1/performance.md" "$record"
    [ "$(grep -c '^### A <GPU>' "$1/performance.md")" = 1 ] && tail -n 20 "$tools/../docs/performance.md" >"$1/tail"
    tail -n 20 "$1/performance.md" | cmp - "$1/tail"
done
if "$tools/gpu_table.py" --write "$1/tail" "$record" 2>/dev/null; then
    echo "gpu_table.py writes into a document without markers" >&2
    exit 1
fi

# What the documents show is what the records say.
cp "$tools/../docs/performance.md" "$1/performance.md"
"$tools/gpu_table.py" --write "$1/performance.md"
cmp "$1/performance.md" "$tools/../docs/performance.md" ||
    { echo "docs/performance.md is older than a record: tools/gpu_table.py --write docs/performance.md" >&2; exit 1; }
for record in "$tools"/../bench/baselines/*.jsonl; do
    drawn=$(basename "$record" .jsonl).svg
    "$tools/plot_bench.py" "$record" --suite fused --out "$1/$drawn"
    cmp "$1/$drawn" "$tools/../docs/figures/$drawn" ||
        { echo "docs/figures/$drawn is older than its record: tools/plot_bench.py $record --suite fused --out docs/figures/$drawn" >&2; exit 1; }
done

one=$("$tools/source_hash.py")
[ "$one" = "$("$tools/source_hash.py")" ] && [ ${#one} = 64 ]
# Comments and line breaks are not sources; a number in the code, or in a string, is.
python3 - "$tools" "$1" <<'END'
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import shutil

from source_hash import LIBRARY, ROOT, files_of, python_hash, source_hash

root = Path(sys.argv[2]) / "sources"
shutil.rmtree(root, ignore_errors=True)
(root / "src/cuda").mkdir(parents=True, exist_ok=True)


def of(text):
    (root / "src/cuda/a.cu").write_text(text, encoding="utf-8")
    return source_hash(root)


plain = of('int a = 1; const char *b = "/* 1 */";\n')
assert of('/* why */ int a = 1; // how\nconst char\n    *b = "/* 1 */";\n') == plain
assert of('int a = 2; const char *b = "/* 1 */";\n') != plain
assert of('int a = 1; const char *b = "/* 2 */";\n') != plain
wide = of('int a = f(g[1], h::k, "( x :: y");\n')
assert of('int a = f(\n    g[\n1], h::\n    k, "( x :: y");\n') == wide
assert of('int a = f(g[1], h::k, "(x :: y");\n') != wide
assert of('int a = f(g[1], h::k, "( x::y");\n') != wide
assert of("#define F(x) 1\n") != of("#define F (x) 1\n")

# Every source of the CUDA backend counts, and what decides its results: not what they are compared with.
shutil.rmtree(root)
for folder in ("include", "src", "cmake", "python"):
    shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))


whole = (source_hash(root), python_hash(root))


def changes(path, text):
    """Which hashes a file decides: the library's, the Python package's."""
    file = root / path
    was = file.read_text(encoding="utf-8")
    file.write_text(was + text, encoding="utf-8")
    now = (source_hash(root), python_hash(root))
    file.write_text(was, encoding="utf-8")
    return now[0] != whole[0], now[1] != whole[1]


code = "\nint added = 1;\n"
for path in ("src/cuda/gdn/gdn_pre_step.cuh", "src/cuda/nn/nn_attention.cu", "src/cuda/nn/blas.c", "src/cuda/common/launch.cuh", "src/core/nn.h",
             "src/core/gdn_math.h", "src/core/ops.def", "src/model/model.c", "src/ops/gdn_pre.c", "include/weft/model.h"):
    assert changes(path, code) == (True, False), path
    assert changes(path, "/* a better sentence */\n") == (False, False), path
counted = set(files_of(ROOT, LIBRARY))
assert {p for p in (ROOT / "src/cuda").rglob("*") if p.is_file()} <= counted
assert changes("cmake/cuda.cmake", "list(APPEND WEFT_CUDA_FLAGS --use_fast_math)\n") == (True, False)
assert changes("cmake/cuda.cmake", "# why\n") == (False, False)
for path in ("src/ref/mhc_post.c", "src/cpu/mhc_post.c"):
    assert changes(path, code) == (False, False), path
assert changes("python/run.c", code) == (False, True)
assert changes("python/weft/torch/ops.py", "added = 1\n") == (False, True)
assert changes("python/weft/torch/ops.py", '# why\n\n"""More\nof it."""\n') == (False, False)
END
python3 "$(dirname "$0")/records.py" "$1/run"
python3 "$(dirname "$0")/fuzz_records.py" "$1/fuzz"
"$tools/gpu_record.py" --verify
