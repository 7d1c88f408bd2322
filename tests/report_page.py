#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/report_page.py <weft> <work folder>: the page of `weft report` in a real browser, headless Chromium.

Each page is laid out 1300 and 390 pixels wide, light and dark. A script in it looks for what a reader would stumble over: an
error of a script, a plot, a bar or a map of which nothing is to be seen, text that is too small, a page wider than the window,
text that does not stand out. The script is tried on pages that are broken on purpose first. Exit status 77: no browser."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

WEFT, WORK = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("WEFT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
SMALLEST = 8.5  # pixels of a letter's height in a chart
CONTRAST = 4.5  # of text, as the accessibility guidelines ask for
HANG_S = 300
failures = 0

PROBE = """<script>
const problems = [];
addEventListener('error', e => problems.push('script error: ' + e.message));
addEventListener('unhandledrejection', e => problems.push('script error: ' + e.reason));
const inside = (a, b) => a.left >= b.left - 2 && a.right <= b.right + 2 && a.top >= b.top - 2 && a.bottom <= b.bottom + 2;
const light = colour => {
  const [r, g, b] = colour.match(/[0-9.]+/g).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
addEventListener('load', () => {
  for (const svg of document.querySelectorAll('svg')) {
    const name = svg.getAttribute('aria-label'), box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll('.mark')].filter(mark => {
      const look = getComputedStyle(mark), at = mark.getBoundingClientRect();
      return (look.stroke !== 'none' || look.fill !== 'none') && at.width + at.height > 1 && inside(at, box);
    });
    if (!marks.length) problems.push('empty plot: ' + name);
    for (const text of svg.querySelectorAll('text')) {
      const size = parseFloat(getComputedStyle(text).fontSize) * box.width / svg.viewBox.baseVal.width;
      if (!(size >= SMALLEST)) { problems.push(`small text in ${name}: ${size}`); break; }
      if (!inside(text.getBoundingClientRect(), box)) { problems.push(`cut text in ${name}: ${text.textContent}`); break; }
    }
  }
  for (const bar of document.querySelectorAll('.bar i')) {
    const at = bar.getBoundingClientRect();
    if (!(at.width > 0 && at.height > 0)) problems.push('empty bar');
  }
  for (const map of document.querySelectorAll('.map table')) {
    const shades = [...map.querySelectorAll('td')].map(td => getComputedStyle(td, '::before'));
    if (!shades.some(s => parseFloat(s.opacity) > 0.1 && s.backgroundColor !== 'rgba(0, 0, 0, 0)')) problems.push('empty map');
  }
  if (document.documentElement.scrollWidth > innerWidth + 1)
    problems.push(`${document.documentElement.scrollWidth} pixels in a window of ${innerWidth}`);
  const paper = getComputedStyle(document.body).backgroundColor;
  for (const words of document.querySelectorAll('h1, h2, p, li, td, summary'))
    if (!(contrast(getComputedStyle(words).color, paper) >= CONTRAST)) { problems.push('faint text'); break; }
  if ((light(paper) < 0.5) !== matchMedia('(prefers-color-scheme: dark)').matches) problems.push('not in the theme asked for');
  const count = name => document.querySelectorAll(name).length;
  parent.postMessage(JSON.stringify({problems, plots: count('svg'), bars: count('.bar'), maps: count('.map table'),
    dark: matchMedia('(prefers-color-scheme: dark)').matches, width: innerWidth}), '*');
});
</script>"""


def say(name, ok, detail=""):
    global failures
    failures += not ok
    print(f"{'ok  ' if ok else 'FAIL'} {name}{': ' + str(detail) if not ok else ''}", flush=True)


def look(page, width, dark):
    """What the script finds on the page, and what the browser itself complains of."""
    probe = PROBE.replace("SMALLEST", str(SMALLEST)).replace("CONTRAST", str(CONTRAST))
    text = page.replace("</head>", probe + "</head>", 1)
    # A window cannot be as narrow as a telephone; a frame can.
    frame = WORK / "frame.html"
    frame.write_text(
        f'<body><pre id="found"></pre><iframe style="width:{width}px;height:2000px;border:0" srcdoc="{html.escape(text)}">'
        "</iframe><script>addEventListener('message', e => document.getElementById('found').textContent = e.data)</script>"
    )
    result = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--virtual-time-budget=3000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={WORK / 'profile'}",
            "--window-size=1400,2100",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=HANG_S,
    )
    said = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.S)
    found = (
        json.loads(html.unescape(said.group(1))) if said and said.group(1) else {"problems": ["the page did not load"]}
    )
    found["problems"] += [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return found


def report(name, *runs):
    out = WORK / f"{name}.html"
    result = subprocess.run([WEFT, "report", "--runs", *runs, "--out", out], capture_output=True, text=True)
    say(f"{name}: a page", result.returncode == 0, result.stderr)
    return out.read_text() if result.returncode == 0 else ""


def shows(name, page, plots, bars, maps, looks=((1300, False), (390, True))):
    for width, dark in looks:
        found = look(page, width, dark)
        ok = (
            not found["problems"]
            and found["dark"] == dark
            and found["width"] == width
            and (found["plots"], found["bars"], found["maps"]) == (plots, bars, maps)
        )
        say(f"{name}, {width} pixels, {'dark' if dark else 'light'}", ok, found)


def train(name, *options):
    small = ["--layers", 3, "--channels", 32, "--heads", 2, "--context", 32, "--batch", 4, "--threads", 1, "--quiet"]
    words = ["train", *small, "--val-every", 5, "--data", WORK / "text.txt", "--out", WORK / name, *options]
    result = subprocess.run([WEFT, *map(str, words)], capture_output=True, text=True)
    say(f"{name}: trained", result.returncode == 0, result.stderr)
    return WORK / name


if not BROWSER:
    print("skipped: there is no Chromium (Debian: chromium); WEFT_BROWSER names another")
    sys.exit(77)
shutil.rmtree(WORK, ignore_errors=True)
WORK.mkdir(parents=True)
(WORK / "text.txt").write_text("the stream and the mix of a residual, " * 2000)

runs = [
    train(f"{kind}-{seed}", "--residual", kind, "--seed", seed, "--steps", 12)
    for kind in ("residual", "hc", "mhc")
    for seed in (1, 2)
]
several = report("several", *runs)
for name, change, word in (
    ("a script error", lambda p: p.replace("</head>", "<script>nothing.at.all()</script></head>"), "not defined"),
    (
        "a late script error",
        lambda p: p.replace("</head>", "<script>setTimeout(() => nothing(), 0)</script></head>"),
        "not defined",
    ),
    ("a plot without lines", lambda p: re.sub(r'<(path|circle) class="mark".*?</\1>', "", p, count=6), "empty plot"),
    ("a plot whose lines are outside", lambda p: re.sub(r' d="M([0-9.]+) ', r' d="M9\1 ', p), "empty plot"),
    ("a map without shades", lambda p: re.sub(r"--v:[0-9.]+", "--v:0", p), "empty map"),
    ("a wide page", lambda p: p.replace("<h1>", '<h1 style="min-width:3000px">'), "pixels in a window"),
    ("small text", lambda p: p.replace("font:13px", "font:5px"), "small text"),
    ("faint text", lambda p: p.replace("--soft:#596273", "--soft:#dddddd"), "faint text"),
):
    broken = change(several)
    found = look(broken, 1300, False)
    say(f"{name} is noticed", broken != several and any(word in problem for problem in found["problems"]), found)

shows("several", several, 6, 6, 6, ((1300, False), (1300, True), (390, False), (390, True)))
shows("one run", report("one", runs[4]), 6, 2, 3)
shows("one step", report("step", train("step", "--steps", 1)), 6, 2, 3)
lines = (runs[5] / "log.jsonl").read_text().splitlines(keepends=True)
(WORK / "killed").mkdir()
(WORK / "killed" / "log.jsonl").write_text("".join(lines[:7]))
unfinished = report("unfinished", *runs[:5], WORK / "killed")
say("unfinished: says so", "Unfinished: killed (6 of 12 steps)." in unfinished and ">12; 6 of 12<" in unfinished)
shows("unfinished", unfinished, 6, 6, 6)
fifty = []
log = (runs[4] / "log.jsonl").read_text()
for seed in range(50):
    (WORK / f"fifty-{seed}").mkdir()
    (WORK / f"fifty-{seed}" / "log.jsonl").write_text(log.replace('"seed":"1"', f'"seed":"{seed}"'))
    fifty.append(WORK / f"fifty-{seed}")
shows("fifty runs", report("fifty", *fifty), 6, 2, 3)
print(f"{failures} failures")
sys.exit(1 if failures else 0)
