"""Block numbers as people write them."""

from __future__ import annotations

from superoffload.errors import InputError


def format_blocks(blocks: tuple[int, ...]) -> str:
    """Write block numbers as ranges: ``(1, 2, 3, 9) -> "1-3, 9"``."""
    runs: list[list[int]] = []
    for b in sorted(blocks):
        if runs and b == runs[-1][-1] + 1:
            runs[-1].append(b)
        else:
            runs.append([b])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def parse_blocks(text: str, allowed: tuple[int, ...], lacks: str = "cannot flow") -> tuple[int, ...]:
    """Read what `format_blocks` writes. Raises InputError for anything else, and for a block that is not allowed, of
    which it says what it `lacks`."""
    chosen: set[int] = set()
    for part in filter(None, (p.strip() for p in text.replace(";", ",").split(","))):
        ends = [e.strip() for e in part.split("-")]
        if len(ends) > 2 or not all(e.isdecimal() and len(e) < 10 for e in ends):
            raise InputError(f'"{part}" is not a block number or a range of them', expected="for example 1-4, 9")
        first, last = int(ends[0]), int(ends[-1])
        if first > last:
            raise InputError(f'"{part}" runs backwards', expected=f"{last}-{first}")
        wrong = next((b for b in (first, last) if b not in allowed), None)  # layers are neighbours
        if wrong is not None:
            raise InputError(
                f"block {wrong} {lacks}", expected=f"transformer layers: {format_blocks(allowed)}",
                remedy="Embedding and head stay on the GPU as they are",
            )  # fmt: skip
        chosen.update(b for b in allowed if first <= b <= last)
    return tuple(sorted(chosen))
