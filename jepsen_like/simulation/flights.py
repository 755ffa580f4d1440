"""Flushes under way: what a power cut in the middle of blocking work finds half done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dledger.testing.sectors import Inode, Names


@dataclass(slots=True)
class FlushedFile:
    """A file whose bytes work has flushed.

    Attributes:
        what: The file.
        sectors: What the platter had of them before.
    """

    what: Inode
    sectors: dict[int, bytes]

    def undo(self) -> None:
        """The flush has not begun."""
        self.what.put_back(self.sectors)
        for sector in self.sectors:
            self.what.undo.pop(sector, None)

    def leave_to_chance(self) -> None:
        """The flush has reached some sectors: they differ again, each for itself."""
        self.what.undo.update(self.sectors)


@dataclass(slots=True)
class FlushedNames:
    """The names of a folder that work has flushed.

    Attributes:
        what: The folder.
        before: What the names stood for on the platter.
        durable: The durable names of the disk.
        chance: Draws from [0, 1).
    """

    what: str
    before: dict[str, Inode | None]
    durable: Names
    chance: Callable[[], float]

    def undo(self) -> None:
        """The flush has not begun."""
        for path, inode in self.before.items():
            if inode is None:
                self.durable.pop(path, None)
            else:
                self.durable[path] = inode

    def leave_to_chance(self) -> None:
        """The flush of a folder is whole, or has not happened."""
        if self.chance() < 0.5:
            self.undo()


@dataclass(slots=True)
class Flight:
    """What work has made durable whose time is not over yet, in order.

    A power cut finds the work at one of its steps: those before it are done, that one has reached
    some sectors, those behind it have not begun.
    """

    steps: list[FlushedFile | FlushedNames] = field(default_factory=list)

    def settle(self, what: Inode | str) -> None:
        """Forget the steps of a file, or of a folder, that a later flush has made durable."""
        self.steps = [step for step in self.steps if step.what != what]

    def cut(self, reached: int) -> None:
        """Undo what a power cut in step *reached* leaves undone; all steps: nothing."""
        for step in reversed(self.steps[reached + 1 :]):
            step.undo()
        if reached < len(self.steps):
            self.steps[reached].leave_to_chance()
