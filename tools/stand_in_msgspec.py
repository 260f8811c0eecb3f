"""What the engine in one process uses of msgspec, in plain Python, for machines that do not have it.

Messages become bytes by pickle, and nothing is checked on the way: good for measuring a GPU, not for two processes.
"""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar


class Struct:
    """A dataclass, made of the annotations of each class below it. Defaults that can change are copied."""

    __struct_fields__: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **of_the_encoding: Any) -> None:
        unknown = of_the_encoding.keys() - {"array_like", "omit_defaults", "gc", "forbid_unknown_fields"}
        if unknown:
            raise TypeError(f"{cls.__name__}: the stand-in for msgspec does not know {sorted(unknown)}")
        for name, value in list(vars(cls).items()):
            if name in cls.__annotations__ and isinstance(value, (list, dict, set)):
                setattr(cls, name, field(default_factory=partial(copy, value)))
        dataclass(frozen=frozen, kw_only=kw_only)(cls)
        cls.__struct_fields__ = tuple(f.name for f in fields(cls))  # type: ignore[arg-type]


class Encoder:
    """Makes bytes of any record."""

    def encode(self, record: Any) -> bytes:
        return pickle.dumps(record)


class Decoder:
    """Makes a record of an encoder's bytes. TypeError if it is of another type."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def decode(self, data: bytes) -> Any:
        record = pickle.loads(data)
        if not isinstance(record, self.kind):
            raise TypeError(f"expected {self.kind.__name__}, got {type(record).__name__}")
        return record


msgpack = SimpleNamespace(Encoder=Encoder, Decoder=Decoder)
structs = SimpleNamespace(replace=replace)
