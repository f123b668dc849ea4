"""The sizes of a conventional attention layer and of its paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_kvqual.errors import StudyError

LARGEST = 4096
"""The largest size of a geometry: beyond it one layer's tensors fill the memory of a small machine."""

_KEYS: Mapping[str, str] = MappingProxyType(
    {"hq": "query_heads", "hkv": "kv_heads", "d": "head_size", "block": "block_size"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Head counts, head size and block size of one attention layer.

    Args:
        query_heads: Query heads; a positive multiple of ``kv_heads``.
        kv_heads: Heads of K and of V.
        head_size: Elements of one head; K and V have the same size.
        block_size: Token positions in one cache block.

    Raises:
        StudyError: A size is not a positive integer, or the heads do not divide.
    """

    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "head_size", "block_size"):
            value: object = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise StudyError(f"found {value!r:.40}, expected an integer from 1 to {LARGEST}, in geometry {name!r}")
        if self.query_heads % self.kv_heads:
            raise StudyError(
                f"found {self.query_heads} query heads over {self.kv_heads} KV heads, expected a multiple, in geometry"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head: query head ``h`` reads KV head ``h // group``."""
        return self.query_heads // self.kv_heads

    def __str__(self) -> str:
        return f"hq={self.query_heads},hkv={self.kv_heads},d={self.head_size},block={self.block_size}"


NAMED: Mapping[str, Geometry] = MappingProxyType(
    {
        "qwen3-8b": Geometry(query_heads=32, kv_heads=8, head_size=128, block_size=16),
        "phi-4": Geometry(query_heads=40, kv_heads=10, head_size=128, block_size=16),
        "smollm2": Geometry(query_heads=9, kv_heads=3, head_size=64, block_size=128),
    }
)


def parse_geometry(text: str) -> Geometry:
    """The geometry that ``text`` names or spells out.

    Args:
        text: A key of ``NAMED``, or all four of ``hq=40,hkv=10,d=128,block=16`` in any order.

    Raises:
        StudyError: Unknown name; a key is unknown, missing or given twice; a value is not a positive integer.
    """
    if text in NAMED:
        return NAMED[text]
    form = f"one of {', '.join(NAMED)}, or hq=40,hkv=10,d=128,block=16"
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in _KEYS:
            raise StudyError(f"found {part.strip()!r}, expected {form}, in geometry {text!r}")
        if _KEYS[key] in sizes:
            raise StudyError(f"found {key!r} twice, expected it once, in geometry {text!r}")
        if not (value.isascii() and value.isdigit() and len(value) <= len(str(LARGEST))):
            raise StudyError(f"found {value!r:.40}, expected a positive integer, for {key!r} in geometry {text!r}")
        sizes[_KEYS[key]] = int(value)
    missing = [key for key, field in _KEYS.items() if field not in sizes]
    if missing:
        raise StudyError(f"found no {', '.join(missing)}, expected {form}, in geometry {text!r}")
    return Geometry(**sizes)
