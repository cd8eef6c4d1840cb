"""Text to token blocks, in an order that depends on the seed only, from any position.

`data` is a text file, a folder of them, JSON lines, CSV or Parquet with a text column, a Hugging Face data set
(``owner/name``, or ``owner/name:configuration``), or ``sample``, the text that ships with the package.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superoffload.errors import InputError, MissingDependency, did_you_mean

SAMPLE = "sample"
TEXT_SUFFIXES = (".txt", ".md", ".text")
TABLE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT_COLUMNS = ("text", "content", "document", "sentence")
PIECE_CHARS = 1 << 20
"""Text is tokenised in pieces of about this many characters, cut at line ends."""

Ids = npt.NDArray[np.int64]


class TokenBlocks:
    """Equal blocks of tokens and the order in which training takes them.

    Sequence number `i` of a run is block ``i mod len`` of epoch ``i // len``; every epoch has its own permutation,
    drawn from (seed, epoch) alone, so that a position is one integer and resuming needs nothing else.
    """

    def __init__(self, blocks: Any, seq_len: int, *, seed: int = 0, name: str = "") -> None:
        """`blocks`: array [blocks, seq_len] of token ids, or a data set with such a column `input_ids`."""
        self.blocks, self.seq_len, self.seed, self.name = blocks, seq_len, seed, name
        self._epoch, self._order = -1, np.arange(0)

    def __len__(self) -> int:
        return len(self.blocks)

    def fingerprint(self) -> str:
        """Hash of what decides the order and, by its ends, the data: a run is resumed on the same only."""
        digest = hashlib.sha256(f"{len(self)} {self.seq_len} {self.seed}".encode())
        for index in (0, len(self) - 1):
            digest.update(self._block(index).tobytes())
        return digest.hexdigest()

    def batch(self, position: int, size: int) -> Tensor:
        """Token ids [size, seq_len] (int64) of the sequences `position` … `position + size - 1`."""
        rows = [self._row(i) for i in range(position, position + size)]
        return torch.from_numpy(np.stack(rows))

    def _row(self, i: int) -> Ids:
        epoch, within = divmod(i, len(self))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self))
            self._epoch = epoch
        return self._block(int(self._order[within]))

    def _block(self, index: int) -> Ids:
        if isinstance(self.blocks, np.ndarray):
            return np.asarray(self.blocks[index], dtype=np.int64)
        return np.asarray(self.blocks[index]["input_ids"], dtype=np.int64)


def load_blocks(
    data: str | os.PathLike[str], tokenizer: Any, seq_len: int, *, seed: int = 0, vocab_size: int | None = None
) -> TokenBlocks:
    """Tokenise `data` into blocks of `seq_len` tokens; what is left over at the end is dropped.

    Args:
        data: see the module's description.
        tokenizer: a transformers tokenizer, or anything with `encode`.
        seq_len: tokens per block.
        seed: of the order.
        vocab_size: of the model; a larger token id is refused.

    Raises:
        InputError: nothing there, no text in it, or too little for one block.
    """
    if seq_len < 2:
        raise InputError(f"seq_len = {seq_len}", expected="at least 2: each token is predicted from those before it")
    name = str(data)
    kind, place = locate(data)
    if kind == "text":
        ids = _tokenise(_read_texts(place), tokenizer)
        count = len(ids) // seq_len
        blocks: Any = ids[: count * seq_len].reshape(count, seq_len)
        tokens, largest = len(ids), int(ids.max(initial=0))
    else:
        blocks, tokens, largest = _tokenise_dataset(_open_dataset(kind, name, place), tokenizer, seq_len, name)
    if len(blocks) == 0:
        raise InputError(
            f"{name} holds {tokens} tokens", expected=f"at least one block of {seq_len}", remedy="Use a shorter seq_len"
        )
    if vocab_size is not None and largest >= vocab_size:
        raise InputError(
            f"{name} has the token id {largest}",
            expected=f"ids below the model's vocabulary of {vocab_size}",
            remedy="Use the tokenizer that belongs to the model",
        )
    return TokenBlocks(blocks, seq_len, seed=seed, name=name)


def sample_text() -> Path:
    """The text that ships with the package: two plays of Shakespeare (public domain), about 245 kB."""
    return Path(__file__).parent / "texts" / "shakespeare.txt"


def locate(data: str | os.PathLike[str]) -> tuple[str, list[Path]]:
    """What `data` is, without reading it: ``text``, ``json``, ``csv`` or ``parquet`` with its files, or ``hub``.

    Raises:
        InputError: a file that does not exist, or a folder without anything readable.
    """
    name = str(data)
    if name == SAMPLE:
        return "text", [sample_text()]
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES and p.is_file())
        if files:
            return "text", files
        for suffix, kind in TABLE_FORMATS.items():
            if files := sorted(path.rglob(f"*{suffix}")):
                return kind, files
        known = ", ".join((*TEXT_SUFFIXES, *TABLE_FORMATS))
        raise InputError(f"the folder {path} holds no text", expected=f"files ending in {known}")
    if path.is_file():
        return TABLE_FORMATS.get(path.suffix.lower(), "text"), [path]
    endings = (*TEXT_SUFFIXES, *TABLE_FORMATS)
    repository = name.split(":")[0]
    if path.suffix.lower() in endings or path.is_absolute() or name[:1] in ".~" or repository.count("/") != 1:
        raise InputError(
            f"no such data file: {name}{_nearest(path)}",
            expected="a text file or folder, a Hugging Face data set (owner/name), or the word sample",
        )
    return "hub", []


def _nearest(path: Path) -> str:
    folder = path.parent
    return did_you_mean(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""


def _read_texts(files: list[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise InputError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}", expected="text") from None


def _tokenise(texts: Iterator[str], tokenizer: Any) -> Ids:
    parts: list[Ids] = []
    for text in texts:
        if parts:
            parts.append(_separator(tokenizer))
        parts.extend(np.asarray(_encode(tokenizer, piece), dtype=np.int64) for piece in _pieces(text))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = text.find("\n", start + PIECE_CHARS) + 1 or len(text)
        yield text[start:stop]
        start = stop


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _separator(tokenizer: Any) -> Ids:
    eos = getattr(tokenizer, "eos_token_id", None)
    return np.asarray([] if eos is None else [eos], dtype=np.int64)


def _open_dataset(kind: str, name: str, files: list[Path]) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise MissingDependency(
            f"reading {name} needs datasets, which is not installed", remedy="pip install 'superoffload[train]'"
        ) from e
    repository, _, configuration = name.partition(":")
    try:
        if kind == "hub":
            return datasets.load_dataset(repository, configuration or None, split="train")
        return datasets.load_dataset(kind, data_files=[str(p) for p in files], split="train")
    except Exception as e:  # datasets raises a dozen kinds, from the connection to the parser
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise InputError(
            f'cannot load the data "{name}": {first}',
            expected="a readable file, or a Hugging Face data set (owner/name) that this machine can reach",
            remedy="Offline, use a text file, or the word sample for the text that ships with the package",
        ) from e


def _tokenise_dataset(dataset: Any, tokenizer: Any, seq_len: int, name: str) -> tuple[Any, int, int]:
    """Blocks on disk (datasets keeps them memory-mapped), the number of tokens seen at most, the largest id."""
    columns = dataset.column_names
    column = next((c for c in TEXT_COLUMNS if c in columns), None)
    if column is None:
        texts = [c for c in columns if getattr(dataset.features[c], "dtype", "") == "string"]
        if len(texts) != 1:
            raise InputError(f"{name} has the columns {', '.join(columns)}", expected='a text column named "text"')
        column = texts[0]
    separator = _separator(tokenizer).tolist()

    def pack(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = [i for text in rows[column] if text for i in (*_encode(tokenizer, str(text)), *separator)]
        blocks = [ids[i : i + seq_len] for i in range(0, len(ids) - seq_len + 1, seq_len)]
        return {"input_ids": blocks, "largest": [max(b) for b in blocks]}

    packed = dataset.map(pack, batched=True, batch_size=1000, remove_columns=columns, load_from_cache_file=False)
    largest = max(packed["largest"]) if len(packed) else 0
    return packed.with_format("numpy", columns=["input_ids"]), len(packed) * seq_len, int(largest)
