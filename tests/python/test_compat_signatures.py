# SPDX-License-Identifier: Apache-2.0
"""Every name of weft.compat has the parameters and defaults of the function whose name it is: those in the table of
peer_signatures.py, and the table is what the peers' sources say where these are at hand: an installed package, or a
folder of unpacked ones in WEFT_TEST_PEERS. Peers are parsed and not imported."""

import importlib
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
from peer_signatures import OWN, PEERS, Peer
from signature_support import ours, theirs

ENTRIES = [(peer, name, want) for peer in PEERS for table in peer.files.values() for name, want in table.items()]


def of(peer: Peer, name: str):
    thing = importlib.import_module(f"weft.compat.{peer.drop_in}")
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("peer, name, want", ENTRIES, ids=[f"{p.drop_in}.{n}" for p, n, _ in ENTRIES])
def test_ours(peer, name, want):
    thing = of(peer, name)
    assert (ours(thing) if want is not None else None) == want


@pytest.mark.parametrize("drop_in", sorted({p.drop_in for p in PEERS}))
def test_every_name_is_in_the_table(drop_in):
    there = set(importlib.import_module(f"weft.compat.{drop_in}").__all__)
    known = {name.split(".")[0] for p in PEERS if p.drop_in == drop_in for t in p.files.values() for name in t}
    own = OWN.get(drop_in, set())
    assert not known & own, "a peer's name is not weft's own"
    assert there == known | own


def root_of(peer: Peer) -> Path | None:
    """The folder that has the package's own folder in it."""
    given = os.environ.get("WEFT_TEST_PEERS")
    folders = [folder for name in given.split(os.pathsep) for folder in below(Path(name))] if given else []
    for folder in (*folders, *map(Path, sys.path)):
        if (folder / peer.mark).is_file() and not (peer.without and (folder / peer.without).exists()):
            return folder
    return None


def below(folder: Path) -> list[Path]:
    return [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]


@pytest.mark.parametrize("peer", PEERS, ids=[f"{p.drop_in} of {p.package}" for p in PEERS])
def test_table_is_what_the_peer_has(peer):
    root = root_of(peer)
    if root is None:
        pytest.skip(
            f"{peer.package}: neither installed nor below a folder of WEFT_TEST_PEERS: the table is not compared"
        )
    version = next((m.name for m in root.glob(f"{peer.package.replace('-', '_')}-*.dist-info")), "of unknown version")
    for path, table in peer.files.items():
        assert (root / path).is_file(), f"{peer.package} in {root} ({version}; the table has {peer.version}): no {path}"
        found = theirs((root / path).read_text())
        for name, want in table.items():
            where = f"{path} of {version}, where the table has {peer.version}"
            assert name in found, f"{name}: expected in {where}"
            assert found[name] == want, f"{name}: in {where}"


SOURCE = """
import torch
try:
    def first(a, /, b: int = 0x10, *rest, c: float, d=1e-6, **more) -> None: pass
except ImportError:
    pass
class Second:
    def __init__(self, x, dtype=torch.float16): pass
    @staticmethod
    def third(n, *, kind="a"): pass
CONSTANT = 3
other = first
"""


def test_sources_are_read_as_signatures_are():
    want = {
        "first": "a, b=16, *rest, c, d=1e-06, **more",
        "Second": "x, dtype=torch.float16",
        "Second.__init__": "self, x, dtype=torch.float16",
        "Second.third": "n, *, kind='a'",
        "CONSTANT": None,
        "other": "a, b=16, *rest, c, d=1e-06, **more",
    }
    assert theirs(SOURCE) == want
    space: dict = {}
    exec(SOURCE, space)
    for name in ("first", "Second", "other"):
        assert ours(space[name]) == want[name]
    assert ours(space["Second"].third) == want["Second.third"]
