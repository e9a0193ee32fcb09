"""Agreement without a message, for ranks of one host that come to the same operation together.

Every rank has a line in memory that all of them see. A rank whose one operation in flight is
known by number writes an offer into its line. Rank 0, when it comes to the same operation, finds
everybody's offer and answers them all by counting one agreement more in its own line.

An offer is one word, so nobody reads half of it:

    the agreement that it is for (24 bits), the operation's number plus 1 (20), frames heard of rank 0 (20)

The frames show that what rank 0 has decided before has arrived: the order of verdicts stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["LINE_WORDS", "MOST_NUMBERS", "Offers"]

LINE_WORDS = 8
"""uint64 words of a rank's line: a cache line, so that no two ranks write to one."""

MOST_NUMBERS = (1 << 20) - 1

_LOW_20, _LOW_24 = (1 << 20) - 1, (1 << 24) - 1


class Offers:
    """One rank's view.

    Args:
        words: `LINE_WORDS` for each rank, zero before the first offer.
        rank: this process's.
    """

    def __init__(self, words: memoryview, rank: int) -> None:
        self._words = words
        self._mine = rank * LINE_WORDS

    @property
    def agreements(self) -> int:
        """How many there have been; the next one has this number plus 1."""
        return int(self._words[0])

    def ask(self, number: int, heard: int, give_up: Callable[[], bool]) -> int:
        """Offer an operation until rank 0 agrees: 0, or the agreement for which it was withdrawn."""
        agreement = self.offer(number, heard)
        while self.agreements < agreement:
            if give_up():
                self.withdraw()
                return agreement
        return 0

    def answer(self, number: int, told: Sequence[int], give_up: Callable[[], bool]) -> bool:
        """On rank 0: agree as soon as all others offer an operation; whether they did."""
        wanted = self.await_all(number, told)
        while not self.complete(wanted):
            if give_up():
                return False
        self.agree()
        return True

    def offer(self, number: int, heard: int) -> int:
        """Be ready for an operation, having heard so many frames; the agreement's number."""
        agreement = self.agreements + 1
        self._words[self._mine] = _word(agreement, number, heard)
        return agreement

    def withdraw(self) -> None:
        """Rank 0 may have agreed by now."""
        self._words[self._mine] = 0

    def await_all(self, number: int, told: Sequence[int]) -> Sequence[int]:
        """On rank 0: what the others' offers of an operation look like, each told so many frames."""
        return [_word(self.agreements + 1, number, frames) for frames in told]

    def complete(self, wanted: Sequence[int]) -> bool:
        """On rank 0: whether all others offer that."""
        words = self._words
        return all(words[i * LINE_WORDS] == word for i, word in enumerate(wanted, 1))

    def agree(self) -> None:
        """On rank 0: from here on everybody runs the operation."""
        self._words[0] += 1


def _word(agreement: int, number: int, frames: int) -> int:
    # Never 0, which is no offer.
    return (agreement & _LOW_24) << 40 | (number + 1) << 20 | frames & _LOW_20
