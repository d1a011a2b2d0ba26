"""Batches of drafters."""

from dataclasses import replace

from model_runner.image import Image, ImageRun
from model_runner.rotary_positions import RotaryPositions
from model_runner.speculative.draft_kv import BlockGenerations, DraftKV
from model_runner.speculative.growing import FrontierNode
from tests.model_runner.speculative.driving import choice_step, new_choice


def test_drafts_after_an_image_have_the_targets_rotary_positions() -> None:
    """An image of two lines and three columns takes six places and three positions."""
    image = Image(b"", bytes(32), (ImageRun(2, 0, 6),), grid=(1, 2, 3))
    choices = [
        replace(new_choice(range(12), slot=0), blocks=[0, 1], rotary=RotaryPositions([image])),
        replace(new_choice(range(9), slot=1), blocks=[2, 3]),
    ]
    kv = DraftKV(BlockGenerations(4), 8, 4)
    steps = []
    for choice in choices:
        kv.begin(choice)
        steps.append(replace(choice_step(choice, 1, 4), blocks=choice.blocks))
    spans = [kv.missing(step, len(step.tokens)) for step in steps]
    batch = kv.known_batch(steps, spans)
    assert batch.rotary_positions.tolist() == [0, 1, *[2] * 6, 5, 6, 7, 8, *range(9)]
    nodes = [FrontierNode(steps[index], index, 0, 5, -1, 1) for index in (1, 0)]
    batch = kv.node_batch(nodes)
    assert (batch.positions.tolist(), batch.rotary_positions.tolist()) == ([12, 9], [9, 9])
