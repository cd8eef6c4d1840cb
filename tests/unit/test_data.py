"""Token blocks: complete, in an order of the seed, from any position; bad data is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from superoffload.errors import InputError  # noqa: E402
from superoffload.model_source import ByteTokenizer  # noqa: E402
from superoffload.train.data import PIECE_CHARS, load_blocks, locate, sample_text  # noqa: E402

BYTES = ByteTokenizer(300)


def text_file(folder: Path, text: str, name: str = "a.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_blocks_hold_the_text_in_order_and_drop_only_the_rest(tmp_path: Path) -> None:
    text = "To be, or not to be — that is the question.\n" * 3
    blocks = load_blocks(text_file(tmp_path, text), BYTES, 8)
    raw = text.encode()
    assert len(blocks) == len(raw) // 8
    assert BYTES.decode(blocks.blocks.reshape(-1)) == raw[: len(blocks) * 8].decode(errors="replace")


def test_every_epoch_takes_each_block_once_in_its_own_order(tmp_path: Path) -> None:
    path = text_file(tmp_path, "".join(chr(97 + i) * 4 for i in range(20)))
    blocks = load_blocks(path, BYTES, 4, seed=3)
    first, second = blocks.batch(0, 20), blocks.batch(20, 20)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == sorted(blocks.blocks[:, 0].tolist())
    assert first.tolist() != second.tolist()
    assert first.dtype == torch.int64


def test_a_position_is_all_that_resuming_needs(tmp_path: Path) -> None:
    path = text_file(tmp_path, "abcdefghijklmnopqrstuvwxyz" * 9)
    whole = load_blocks(path, BYTES, 4, seed=1).batch(0, 150)
    fresh = load_blocks(path, BYTES, 4, seed=1)
    assert torch.equal(fresh.batch(57, 40), whole[57:97])
    assert torch.equal(fresh.batch(3, 2), whole[3:5])
    assert not torch.equal(load_blocks(path, BYTES, 4, seed=2).batch(0, 50), whole[:50])


def test_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    line = "a" * 9999 + "\n"
    text = line * (PIECE_CHARS // 10000 + 20)
    blocks = load_blocks(text_file(tmp_path, text), BYTES, 1000)
    assert len(blocks) == len(text) // 1000


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    text_file(tmp_path, "bbbb", "b.txt")
    text_file(tmp_path, "aaaa", "a.txt")
    blocks = load_blocks(tmp_path, BYTES, 9)
    assert blocks.blocks.tolist() == [[98] * 4 + [0] + [99] * 4], "files in order of name, a separator between"


def test_json_lines_are_read_through_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [{"title": "x", "text": "abcd" * 5}, {"title": "y", "text": "efgh" * 5}]
    path = text_file(tmp_path, "".join(json.dumps(r) + "\n" for r in rows), "a.jsonl")
    blocks = load_blocks(path, BYTES, 6)
    stream = [b + 1 for b in b"abcd" * 5] + [0] + [b + 1 for b in b"efgh" * 5] + [0]
    assert sorted(blocks.batch(0, 7).tolist()) == sorted(stream[i : i + 6] for i in range(0, 42, 6))


def test_the_sample_text_is_there(tmp_path: Path) -> None:
    assert sample_text().stat().st_size < 400_000
    assert "Macbeth" in sample_text().read_text()
    assert locate("sample") == ("text", [sample_text()])


@pytest.mark.parametrize(
    "name", ["missing.txt", "./missing", "/nowhere/data.jsonl", "a/b/c/d", "~/nothing-here", "word"]
)
def test_a_missing_file_is_bad_input(name: str) -> None:
    with pytest.raises(InputError, match="no such data file") as caught:
        load_blocks(name, BYTES, 8)
    assert caught.value.exit_code == 2


def test_a_data_set_that_cannot_be_reached_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r'cannot load the data "nobody/nothing".*the word sample'):
        load_blocks("nobody/nothing", BYTES, 8)


def test_a_misspelt_file_is_suggested(tmp_path: Path) -> None:
    text_file(tmp_path, "x" * 20, "shakespeare.txt")
    with pytest.raises(InputError, match=r'did you mean "shakespeare\.txt"'):
        load_blocks(tmp_path / "shakespear.txt", BYTES, 8)


def test_unusable_data_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds 3 tokens.*at least one block of 8"):
        load_blocks(text_file(tmp_path, "abc"), BYTES, 8)
    with pytest.raises(InputError, match="at least 2"):
        load_blocks(text_file(tmp_path, "abc"), BYTES, 1)
    (tmp_path / "bin.txt").write_bytes(b"\xff\xfe\x00abc")
    with pytest.raises(InputError, match="not UTF-8"):
        load_blocks(tmp_path / "bin.txt", BYTES, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no text"):
        load_blocks(tmp_path / "empty", BYTES, 8)
    with pytest.raises(InputError, match="vocabulary of 90"):
        load_blocks(text_file(tmp_path, "abcdefgh" * 4), BYTES, 8, vocab_size=90)
    with pytest.raises(InputError, match="at least 257"):
        ByteTokenizer(256)
