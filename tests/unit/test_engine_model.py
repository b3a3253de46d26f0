"""The machine agrees with the obvious model, on any commands in any order, and with itself on every replica."""

from __future__ import annotations

from engine_model import MOVES_SEEN, STEPS, Step, Story, merged, play_again
from hypothesis import given, settings

from wheelsched.model.states import LEGAL


def told(steps: list[Step]) -> Story:
    story = Story()
    for step in steps:
        story.step(step)
    return story


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_the_machine_does_what_the_obvious_model_does(steps: list[Step]) -> None:
    """Method: statuses, versions, attempts, tokens, refusals after every entry (`token_grows`, `one_live_lease`, `never_early`);
    rows of all families and counts by `EngineGroup.check`; every change of a seen status by the table of moves."""
    story = told(steps)
    for before, cause, after in sorted(story.moves):
        assert (before, cause, after) in MOVES_SEEN, (before.name, cause, after.name)


@settings(max_examples=80, deadline=None)
@given(steps=STEPS)
def test_two_replicas_hold_the_same_bytes(steps: list[Step]) -> None:
    """`applied_agrees`, whether rows were read ahead or one by one, and however the commands of one stamp fall into entries."""
    story = told(steps)
    for entries, prefetch in ((story.entries, False), (merged(story.entries), True), (merged(story.entries), False)):
        group, effects = play_again(entries, prefetch=prefetch)
        assert group.reader.families == story.group.reader.families
        assert group.state == story.group.state
        assert effects == story.all_effects


def test_random_stories_reach_every_move_but_those_of_time() -> None:
    """The model test is worth little if its stories never get anywhere: count the moves of a fixed set of them."""
    import random

    rng, seen = random.Random(7), set()
    kinds = ("create", "claim", "complete", "expire", "release", "cancel", "update", "run", "redrive", "start_deadline", "nothing")
    for _ in range(60):
        steps = [
            Step(rng.choice(kinds), rng.choice("abcd"), rng.choice((0, 1, 700, 3_000, -2_500)), rng.randrange(64), rng.random() < 0.5)
            for _ in range(60)
        ]
        seen |= told(steps).moves
    pairs = {(before, after) for before, _, after in seen}
    # QUEUED comes from a watermark, which is no change of a job; a discard leaves no job after it.
    missing = {(before.name, after.name) for before, after in LEGAL - pairs}
    assert missing <= {("DEAD", "DISCARDED")}, missing
    assert seen <= MOVES_SEEN
