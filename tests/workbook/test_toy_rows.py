"""Rows of a small target's training: shares of chats, copy tasks and library source, and what that source is."""

import itertools
import random

import numpy as np
import pytest

from specdec.training.drafter.chats import ANSWER, LIBRARY, Document, pack

from workbook.toy_rows import MixedRows, fill_gaps, library_piece, library_text


def document(length: int, token: int) -> Document:
    return Document(np.full(length, token), np.full(length, ANSWER, np.uint8))


def test_gaps_are_filled_row_by_row():
    rooms = []

    def fill(room):
        rooms.append(room)
        piece = document(min(room, 2), 4)
        return Document(piece.ids, np.full_like(piece.kind, LIBRARY))

    filled = pack([document(2, 2), document(3, 3)], 2, 5)
    fill_gaps(filled, fill)
    assert filled.ids.tolist() == [[3, 3, 3, 2, 2], [4, 4, 4, 4, 4]] and rooms == [5, 3, 1]
    assert filled.document.tolist() == [[0, 0, 0, 1, 1], [2, 2, 3, 3, 4]]
    assert (filled.kind[1] == LIBRARY).all() and (filled.kind[0] == ANSWER).all()


def test_blocks_keep_their_shares():
    library = [np.arange(100, 160), np.arange(200, 230)]
    options = dict(seed=3, length=20, block_rows=32)

    def given(block_seed):
        seen.append(block_seed)
        return itertools.repeat(document(10, 7))

    def task(rng):
        return document(10, 8)

    seen: list = []
    rows = MixedRows(given, library, task, **options, copy_task_frac=0.5, library_frac=0.25)
    block = rows.block(2)
    share = 0.5 * 0.5 ** (2 / 16)
    assert rows.copy_task_share(0) == 0.5 and rows.copy_task_share(16) == 0.25 and rows.copy_task_share(2) == share
    assert rows.copy_task_share(400) == pytest.approx(0, abs=1e-6)
    counts = {token: int((block.ids == token).sum()) for token in (7, 8)}
    assert seen == ["3/2"] and counts[8] == pytest.approx(480 * share, abs=10)
    assert counts[7] + counts[8] == 480 and (block.kind == LIBRARY).sum() == 160 and not (block.document < 0).any()
    usual, again = MixedRows(given, library, task, **options), MixedRows(given, library, task, **options)
    other = MixedRows(given, library, task, **options | {"seed": 4})
    assert (usual.block(1).ids == again.block(1).ids).all() and (usual.block(1).ids != other.block(1).ids).any()
    assert (usual.block(0).kind == LIBRARY).mean() == pytest.approx(0.15, abs=0.03)
    bare = MixedRows(given, [], task, **options)
    assert bare.library_frac == 0.0 and (bare.block(0).kind == ANSWER).all()


def test_pieces_of_library_modules_which_are_ascii_without_some_packages():
    rng, modules = random.Random(0), [np.arange(100), np.arange(100, 400)]
    pieces = [library_piece(rng, modules, [100, 400], 20) for _ in range(4000)]
    starts = np.array([piece.ids[0] for piece in pieces])
    assert (starts < 100).mean() == pytest.approx(0.25, abs=0.03), "longer modules are chosen more often"
    assert np.isin(starts, (0, 100)).mean() == pytest.approx(0.25 + 0.75 * (0.25 / 90 + 0.75 / 290), abs=0.03)
    assert starts[starts < 100].max() == 89 and starts.max() == 389, "half a piece before the end at most"
    assert {len(piece.ids) for piece in pieces} == set(range(11, 21))
    assert all((piece.kind == LIBRARY).all() and piece.kind.dtype == np.uint8 for piece in pieces[:50])
    modules = dict(library_text())
    assert sum(map(len, modules.values())) > 2_000_000 and all(map(str.isascii, modules.values()))
    packages = {name.split(".")[0] for name in modules}
    assert {"argparse", "json"} <= packages and packages.isdisjoint({"pathlib", "typing", "encodings", "idlelib"})
