"""Which KV formats are declared, and what is known of each without looking at a tensor. Needs no torch.

An arm may name any format. One that is not in :data:`DECLARED` gets the gates that need no declaration; those of
:data:`NEED_DECLARATION` say what they could not establish, and never pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """One declared format: the physical bytes per element of K and of V, and a line for a reader.

    ``flags`` are the values of the engine's ``--kv-cache-dtype`` under which a stock backend stores it; empty for a
    format of our own backends.
    """

    k_bytes: int
    v_bytes: int
    line: str
    flags: tuple[str, ...] = ()


_E4M3_FLAGS, _E5M2_FLAGS = ("fp8", "fp8_e4m3"), ("fp8_e5m2",)

DECLARED: Final[Mapping[str, Declaration]] = MappingProxyType(
    {
        "k16v16": Declaration(k_bytes=2, v_bytes=2, line="K, then V, 16 bits each"),
        "k16v8": Declaration(k_bytes=2, v_bytes=1, line="K in 16 bits, then V as E4M3 over a scale"),
        "k8v8": Declaration(k_bytes=1, v_bytes=1, line="K, then V, as E4M3 over scales"),
        "cpu-attn-bf16": Declaration(
            k_bytes=2, v_bytes=2, line="vLLM's CPU cache with K and V in 16 bits", flags=("auto",)
        ),
        "cpu-attn-fp8-e4m3": Declaration(
            k_bytes=1, v_bytes=1, line="vLLM's CPU cache with K and V as E4M3, by definition", flags=_E4M3_FLAGS
        ),
        "cpu-attn-fp8-e5m2": Declaration(
            k_bytes=1, v_bytes=1, line="vLLM's CPU cache with K and V as E5M2, by definition", flags=_E5M2_FLAGS
        ),
        "cpu-attn-fp8-e4m3-toward-zero": Declaration(
            k_bytes=1, v_bytes=1, line="vLLM's CPU cache with K and V as E4M3, cut off", flags=_E4M3_FLAGS
        ),
        "cpu-attn-fp8-e5m2-toward-zero": Declaration(
            k_bytes=1, v_bytes=1, line="vLLM's CPU cache with K and V as E5M2, cut off", flags=_E5M2_FLAGS
        ),
    }
)
"""The formats that a study's arm may have and that every gate can be asked of, by name."""

NEED_DECLARATION: Final = ("identity", "routing", "shifted-outputs", "placement", "replay")
"""The gates that need to know what a cell must hold. The others look at names, maps, tokens and losses alone."""


def is_declared(kv_format: str) -> bool:
    """Whether every gate can be asked of an arm with this format."""
    return kv_format in DECLARED


def not_established(kv_format: str, what: str) -> str:
    """The one line of a gate that needs a declaration where there is none; ``what`` is what stays open."""
    return (
        f"found no declaration of the KV format '{kv_format}', expected one of {', '.join(DECLARED)}: {what} could not "
        "be established"
    )
