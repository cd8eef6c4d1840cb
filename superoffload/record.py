"""Frozen records with exact JSON in and out: the only thing that flows between the stages.

Unknown keys are refused with the nearest known one, files are written to a temporary name and renamed,
and a file says which kind of record it holds, so that a plan is never read as a profile.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from superoffload.errors import InputError, did_you_mean

R = TypeVar("R", bound="Record")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends, and is removed when it fails, so that no
    reader sees half of it. Missing folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes 0600, which would surprise people who share a folder
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """`value` with None for each number that is not finite, however deep: JSON has no such numbers, and not every
    reader takes what Python writes for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write `data` to `path` as a whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    return Path(path)


class Record(BaseModel):
    """Base of all records: immutable, closed to unknown keys, equal by value."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=())

    schema_name: ClassVar[str] = ""
    """Kind written into files; records that are never saved alone leave it empty."""
    schema_version: ClassVar[int] = 1

    def to_json(self, *, indent: int | None = 2) -> str:
        """Serialise exactly: ``type(r).from_json(r.to_json()) == r``."""
        body = self.model_dump(mode="json")
        if self.schema_name:
            body = {"schema": self.schema_name, "schema_version": self.schema_version, **body}
        return json.dumps(body, indent=indent, ensure_ascii=False)

    @classmethod
    def from_json(cls: type[R], text: str | bytes, *, where: str = "the given JSON") -> R:
        """Parse what `to_json` wrote. Raises InputError that names the key, the value and the remedy."""
        try:
            body: Any = json.loads(text)
        except json.JSONDecodeError as e:
            raise InputError(f"{where} is not JSON: {e}", remedy="Write it again with .save()") from None
        if not isinstance(body, dict):
            raise InputError(f"{where} holds a JSON {type(body).__name__}", expected=f"an object ({cls.__name__})")
        return cls.from_dict(body, where=where)

    @classmethod
    def from_dict(cls: type[R], body: dict[str, Any], *, where: str = "the given values") -> R:
        """Validate a dictionary, with the same errors as `from_json`."""
        body = dict(body)
        kind, version = body.pop("schema", cls.schema_name), body.pop("schema_version", cls.schema_version)
        if kind != cls.schema_name:
            raise InputError(f'{where} holds a "{kind}"', expected=f'a "{cls.schema_name}" record')
        if version != cls.schema_version:
            raise InputError(
                f"{where} has schema_version {version}",
                expected=f"{cls.schema_version}",
                remedy="Write it again with this version of superoffload",
            )
        try:
            return cls.model_validate(body)
        except ValidationError as e:
            raise InputError(_explain(cls, e, where)) from None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record as JSON; the file appears whole or not at all."""
        return write_atomic(path, self.to_json() + "\n")

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read a record that `save` wrote. Raises InputError for a missing or foreign file."""
        p = Path(path)
        if not p.is_file():
            raise InputError(f"no such file: {p}", expected=f"a {cls.schema_name or cls.__name__} file")
        return cls.from_json(p.read_bytes(), where=str(p))

    def replace(self: R, **changes: Any) -> R:
        """Return a validated copy with some fields changed."""
        return type(self).from_dict({**{k: getattr(self, k) for k in type(self).model_fields}, **changes})


def _explain(cls: type[Record], error: ValidationError, where: str) -> str:
    lines: list[str] = []
    for item in error.errors():
        loc = ".".join(str(x) for x in item["loc"])
        if item["type"] == "extra_forbidden":
            names = _fields_at(cls, item["loc"][:-1])
            lines.append(f'unknown key "{loc}"{did_you_mean(str(item["loc"][-1]), names)}')
        elif item["type"] == "missing":
            lines.append(f'missing key "{loc}"')
        else:
            lines.append(f"{loc or cls.__name__} = {item['input']!r}: {item['msg']}")
    return f"{where}: " + "; ".join(lines)


def _fields_at(cls: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the record nested at `loc`, for the suggestion; empty where the type is not a record."""
    node: Any = cls
    for key in loc:
        if isinstance(key, int):
            continue
        field = getattr(node, "model_fields", {}).get(key)
        node = next((t for t in _types_in(getattr(field, "annotation", None)) if hasattr(t, "model_fields")), None)
    return list(getattr(node, "model_fields", {}))


def _types_in(annotation: Any) -> list[Any]:
    args = getattr(annotation, "__args__", None)
    return [t for a in args for t in _types_in(a)] if args else [annotation]
