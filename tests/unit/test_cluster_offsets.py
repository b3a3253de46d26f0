"""Clock offsets of peers, against simulated clocks and networks whose truth is known."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from wheelsched.cluster.offsets import AGE_MS_MAX, ClockOffsets

WALL = 1_767_413_106_007


@dataclass
class World:
    """True time, and the clocks of two nodes; a round trip takes what it is told."""

    offsets: ClockOffsets
    mono_ms: int = 5_000
    wall_ahead_ms: int = WALL  # our wall clock against our monotonic one
    peer_ahead_ms: dict[int, int] = None  # type: ignore[assignment]

    def round(self, peer: int, *, there_ms: int = 1, back_ms: int = 1, at_peer_ms: int = 0) -> None:
        sent = self.mono_ms
        self.mono_ms += there_ms
        received = self.mono_ms + WALL + self.peer_ahead_ms[peer]
        self.mono_ms += at_peer_ms
        answered = self.mono_ms + WALL + self.peer_ahead_ms[peer]
        self.mono_ms += back_ms
        self.offsets.add(peer, sent_mono_ms=sent, received_at_ms=received, answered_at_ms=answered, back_mono_ms=self.mono_ms)

    @property
    def now(self) -> dict[str, int]:
        return {"wall_ms": self.mono_ms + self.wall_ahead_ms, "mono_ms": self.mono_ms}


def a_world(node_count: int = 3, **ahead_ms: int) -> World:
    peers = {int(name[1:]): ahead for name, ahead in ahead_ms.items()}
    return World(ClockOffsets(node_count), peer_ahead_ms=peers)


@given(
    ahead_ms=st.integers(-(10**9), 10**9),
    rounds=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(0, 50)), min_size=1, max_size=20),
)
def test_error_is_never_more_than_half_the_quickest_round_kept(ahead_ms: int, rounds: list[tuple[int, int, int]]) -> None:
    world = a_world(p2=ahead_ms)
    for there, back, at_peer in rounds:
        world.round(2, there_ms=there, back_ms=back, at_peer_ms=at_peer)
    found = world.offsets.offset_ms(2, **world.now)
    quick = [there + back for there, back, _ in rounds if there + back <= 250][-8:]
    if not quick:
        assert found is None
    else:
        assert found is not None and abs(found - ahead_ms) <= min(quick) // 2 + 1


def test_one_quick_round_outweighs_slow_and_lopsided_ones() -> None:
    world = a_world(p2=40)
    for _ in range(3):
        world.round(2, there_ms=200, back_ms=0)
    assert world.offsets.offset_ms(2, **world.now) == 140
    world.round(2)
    world.round(2, there_ms=200, back_ms=0)
    assert world.offsets.offset_ms(2, **world.now) == 40


def test_slow_rounds_are_thrown_away() -> None:
    world = a_world(p2=0)
    world.round(2, there_ms=251, back_ms=0)
    assert world.offsets.offset_ms(2, **world.now) is None
    assert world.offsets.round_trip_ms(2) is None


def test_a_step_of_our_own_wall_clock_is_seen_at_once() -> None:
    """Nothing was measured since; waiting for eight new rounds would let a wrong hour fire."""
    world = a_world(p2=0, p3=0)
    world.round(2)
    world.round(3)
    world.wall_ahead_ms += 3_600_000
    assert world.offsets.offset_ms(2, **world.now) == -3_600_000
    assert world.offsets.is_off(**world.now)


def test_a_step_of_the_peers_clock_is_believed_with_the_next_round() -> None:
    world = a_world(p2=0)
    for _ in range(8):
        world.round(2)
    world.peer_ahead_ms[2] = 700
    world.round(2, there_ms=3, back_ms=3)
    assert world.offsets.offset_ms(2, **world.now) == 700


def test_a_clock_that_stepped_between_receipt_and_answer_gives_no_sample() -> None:
    offsets = ClockOffsets(2)
    offsets.add(2, sent_mono_ms=10, received_at_ms=WALL, answered_at_ms=WALL + 5_000, back_mono_ms=12)
    offsets.add(2, sent_mono_ms=10, received_at_ms=WALL, answered_at_ms=WALL - 5_000, back_mono_ms=12)
    assert offsets.offsets_ms(wall_ms=WALL, mono_ms=12) == {}


def test_what_is_old_is_not_known() -> None:
    world = a_world(p2=0)
    world.round(2)
    world.mono_ms += AGE_MS_MAX + 1
    assert world.offsets.offset_ms(2, **world.now) is None


def test_median_of_the_cluster_needs_more_than_half_of_it() -> None:
    world = a_world(3, p2=1_000, p3=1_010)
    assert world.offsets.majority_offset_ms(**world.now) is None
    world.round(2)
    # Two of three are known: nobody confirms either.
    assert world.offsets.majority_offset_ms(**world.now) == 0
    world.round(3)
    assert world.offsets.majority_offset_ms(**world.now) == 1_000


def test_off_means_off_from_more_than_half() -> None:
    for node_count, ahead_ms, off in (
        (3, (251, 251), True),
        (3, (-251, 251), True),
        (3, (250, 251), False),
        (3, (9_999, 0), False),
        (2, (9_999,), False),  # of two, neither can be told to be wrong
        (1, (), False),
        (5, (300, 300, 300, 0), True),
        (5, (300, 300, 0, 0), False),
        (4, (300, 300, 0), False),
        (4, (300, 300, 300), True),
    ):
        world = a_world(node_count, **{f"p{number + 2}": ahead for number, ahead in enumerate(ahead_ms)})
        for peer in world.peer_ahead_ms:
            world.round(peer)
        assert world.offsets.is_off(**world.now) is off, (node_count, ahead_ms)


def test_a_node_that_left_counts_no_more() -> None:
    world = a_world(3, p2=900, p3=900)
    world.round(2)
    world.round(3)
    world.offsets.forget(3)
    assert not world.offsets.is_off(**world.now)
    assert world.offsets.offsets_ms(**world.now) == {2: 900}
