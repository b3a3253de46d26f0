"""The machine agrees with the obvious model, on any commands in any order, and with itself on every replica."""

from __future__ import annotations

import random

from builders import one_by_one
from engine_model import MOVES_SEEN, STEPS, Step, merged, play_again, random_stories, told
from hypothesis import given, settings

from wheelsched.model.states import LEGAL, Status


@settings(max_examples=400, deadline=None)
@given(steps=STEPS)
def test_the_machine_does_what_the_obvious_model_does(steps: list[Step]) -> None:
    """Method: statuses, versions, attempts, tokens, refusals after every entry (`token_grows`, `one_live_lease`, `never_early`);
    rows of all families and counts by `EngineGroup.check`; every change of a seen status by the table of moves."""
    story = told(steps)
    for before, cause, after in sorted(story.moves):
        assert (before, cause, after) in MOVES_SEEN, (before.name, cause, after.name)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_two_replicas_hold_the_same_bytes(steps: list[Step]) -> None:
    """`applied_agrees`, whether rows were read ahead or one by one, and however the commands of one stamp fall into entries."""
    story = told(steps)
    for entries, prefetch in ((story.entries, False), (merged(story.entries), True), (merged(story.entries), False)):
        group, effects = play_again(entries, prefetch=prefetch)
        assert group.reader.families == story.group.reader.families
        assert group.state == story.group.state
        assert one_by_one(effects) == one_by_one(story.all_effects)


def test_random_stories_reach_every_move() -> None:
    """The model test is worth little if its stories never get anywhere. Method: the moves of a fixed set of them."""
    seen = set()
    for story in random_stories(random.Random(7), 250):
        seen |= story.moves
    # A discard leaves no job to be seen afterwards.
    reached = {(before, after) for before, _, after in seen} | {(Status.DEAD, Status.DISCARDED)}
    assert reached >= LEGAL, [(before.name, after.name) for before, after in sorted(LEGAL - reached)]
    assert seen <= MOVES_SEEN
