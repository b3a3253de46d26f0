"""How a number of claims is shared out: priorities by smooth weighted round robin, tenants by deficit round robin.

Integers only, and no set is iterated: the same calls give the same answers everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Shares = tuple[int, int, int]


def whole_rounds(n: int, claimants: Iterable[tuple[int, int]]) -> int:
    """How many full rounds of (weight, available) fit into n and leave nobody short."""
    claimants = list(claimants)
    round_size = sum(weight for weight, _ in claimants)
    return min(n // round_size, min(available // weight for weight, available in claimants))


class PriorityShares:
    """Shares for critical, default and bulk.

    Smooth weighted round robin, as in nginx: for each claim every class with work is credited its weight, the one with the
    most credit is served and pays the weights of all. It interleaves (no run of 70), a split of n equals n splits of 1 (within two, where
    a class runs out), and each span of 100 claims with work everywhere is exactly 70/25/5.

    Credit is earned while a class has work, and lost when it runs out; debt stays. So an idle class hoards nothing, and one
    that always shows a single job cannot shed its debt by running out after each. ValueError for a weight below 1.
    """

    def __init__(self, weights: Shares = (70, 25, 5)) -> None:
        if min(weights) < 1:
            raise ValueError(f"weights {weights} must be 1 or more")
        self._weights = weights
        self._credit = [0, 0, 0]

    def split(self, n: int, available: Shares) -> Shares:
        """How many of `n` claims each class gets, at most its `available`; their sum is min(n, sum(available)).

        ValueError for a negative argument. O(sum of weights), whatever n is.
        """
        if n < 0 or min(available) < 0:
            raise ValueError(f"n {n} and available {available} must be 0 or more")
        left = min(n, sum(available))
        taken = [0, 0, 0]
        self._forget_credit(available, taken)
        while left:
            active = [i for i in range(3) if taken[i] < available[i]]
            # Whole rounds leave the credit as it was, so they can be handed out at once.
            rounds = whole_rounds(left, ((self._weights[i], available[i] - taken[i]) for i in active))
            for i in active:
                taken[i] += rounds * self._weights[i]
            left -= rounds * sum(self._weights[i] for i in active)
            left -= self._serve(left, available, taken)
        self._forget_credit(available, taken)
        return taken[0], taken[1], taken[2]

    def check(self) -> None:
        """Raise AssertionError unless every credit is within one round."""
        assert all(abs(credit) <= sum(self._weights) for credit in self._credit), self._credit

    def _serve(self, n: int, available: Shares, taken: list[int]) -> int:
        """Serve up to `n` claims one by one until a class runs out of work; how many were served."""
        active = [i for i in range(3) if taken[i] < available[i]]
        for served in range(n):
            if any(taken[i] == available[i] for i in active):
                self._forget_credit(available, taken)
                return served
            for i in active:
                self._credit[i] += self._weights[i]
            winner = max(active, key=lambda i: (self._credit[i], -i))
            self._credit[winner] -= sum(self._weights[i] for i in active)
            taken[winner] += 1
        return n

    def _forget_credit(self, available: Shares, taken: list[int]) -> None:
        bound = sum(self._weights)
        for i in range(3):
            # The bound matters only when classes keep losing credit: what they lose, the others would owe for ever.
            highest = 0 if taken[i] == available[i] else bound
            self._credit[i] = max(-bound, min(highest, self._credit[i]))


class DeficitRoundRobin:
    """Shares for tenants: each in turn takes up to its weight, and what one leaves flows on.

    Shreedhar & Varghese 1995 with jobs of cost 1. A deficit can then only be left where `n` ran out in the middle of a turn:
    it is one number, and belongs to the key the next allotment starts with.
    """

    def __init__(self) -> None:
        self._weights: dict[str, int] = {}
        self._places: dict[str, int] = {}  # order of turns: of adding
        self._next_place = 0
        self._cursor = 0  # place whose turn it is
        self._unused = 0  # what is left of that turn, when it was cut short; else 0

    def __contains__(self, key: str) -> bool:
        return key in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, key: str, weight: int) -> None:
        """Add a key at the end of the round, or change its weight in place. ValueError for a weight below 1. O(1)."""
        if weight < 1:
            raise ValueError(f"weight {weight} of {key!r} is below 1")
        self._weights[key] = weight
        if key not in self._places:
            self._places[key] = self._next_place
            self._next_place += 1
        elif self._places[key] == self._cursor:
            self._unused = min(self._unused, weight)

    def remove(self, key: str) -> None:
        """Forget a key; KeyError if it is unknown. O(1)."""
        del self._weights[key]
        if self._places.pop(key) == self._cursor:
            self._unused = 0

    def allot(self, n: int, available: Mapping[str, int]) -> dict[str, int]:
        """How many of `n` claims each key gets, at most what it has `available`; keys that get none are left out.

        The sum is min(n, sum of available), and repeated calls continue the round where the last one stopped.
        ValueError for a negative number, KeyError for an unknown key. O(n + keys log keys), keys being those available.
        """
        if n < 0 or any(count < 0 for count in available.values()):
            raise ValueError(f"n {n} and what is available must be 0 or more")
        wanting = self._in_turn(available)
        left = min(n, sum(available.values()))
        allotted = dict.fromkeys(wanting, 0)
        if left and self._places[wanting[0]] != self._cursor:
            self._unused = 0  # the key that was cut short has no work now: its deficit ends, as in the paper
        while left:
            if not self._unused:
                left -= self._allot_rounds(left, wanting, available, allotted)
            for key in wanting:
                left -= self._take_turn(key, left, available, allotted)
                if not left:
                    break
            wanting = [key for key in wanting if allotted[key] < available[key]]
        return {key: count for key, count in allotted.items() if count}

    def check(self) -> None:
        """Raise AssertionError unless places and the deficit agree with the keys."""
        assert self._weights.keys() == self._places.keys()
        assert len(set(self._places.values())) == len(self._places)
        assert self._unused == 0 or any(place == self._cursor and self._unused <= self._weights[key] for key, place in self._places.items())

    def _in_turn(self, available: Mapping[str, int]) -> list[str]:
        """The keys with work in the order of their turns, from the cursor on."""
        in_order = sorted((key for key, count in available.items() if count), key=self._places.__getitem__)
        return sorted(in_order, key=lambda key: self._places[key] < self._cursor)

    def _allot_rounds(self, n: int, wanting: list[str], available: Mapping[str, int], allotted: dict[str, int]) -> int:
        """Hand out the rounds in which everybody takes a full turn at once; how many claims that was."""
        rounds = whole_rounds(n, ((self._weights[key], available[key] - allotted[key]) for key in wanting))
        for key in wanting:
            allotted[key] += rounds * self._weights[key]
        return rounds * sum(self._weights[key] for key in wanting)

    def _take_turn(self, key: str, n: int, available: Mapping[str, int], allotted: dict[str, int]) -> int:
        """Give `key` its turn, out of `n` that are left; how many it took. Moves the cursor past it unless n ran out first."""
        turn = self._unused or self._weights[key]
        missing = available[key] - allotted[key]
        taken = min(turn, missing, n)
        allotted[key] += taken
        cut = taken == n < min(turn, missing)
        self._unused = turn - taken if cut else 0
        self._cursor = self._places[key] + (0 if cut else 1)
        return taken
