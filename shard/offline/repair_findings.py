"""Findings of a repair: the records that are lost, and notes for the operator."""

from __future__ import annotations

import msgspec


class CannotRepair(Exception):
    """Too much is damaged: the remaining files prove nothing."""


class Loss(msgspec.Struct, frozen=True):
    """Live records first_seq..last_seq of a box that are lost, or may be."""

    box: str
    generation: int
    first_seq: int
    last_seq: int
    why: str


class Findings:
    """Losses and notes, in the order in which the repair finds them."""

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.notes: list[str] = []

    def __repr__(self) -> str:
        return f"<Findings: {len(self.losses)} losses, {len(self.notes)} notes>"
