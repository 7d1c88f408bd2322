# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation site. Equations become MathML while the site is built, so that a page needs no script for them. The
theme's script for search without a server, which it would fetch from the network, is worker.js instead."""

import html
import re

from latex2mathml.converter import convert

EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>',
    re.S,
)

SHIM = re.compile(r'<script src="https://[^"]*iframe-worker[^"]*"></script>')


def mathml(match: re.Match) -> str:
    display = "block" if match["open"] == "[" else "inline"
    return convert(html.unescape(match["tex"]).strip(), display=display)


def on_page_content(content, page, config, files):
    content = EQUATION.sub(mathml, content)
    if 'class="arithmatex"' in content:
        raise SystemExit(f"{page.file.src_uri}: an equation was not converted")
    return content


def on_post_page(output, page, config):
    to_root = "../" * page.file.dest_uri.count("/")
    return SHIM.sub(f'<script src="{to_root}worker.js"></script>', output)


def on_post_template(output_content, template_name, config):
    return SHIM.sub('<script src="/worker.js"></script>', output_content)
