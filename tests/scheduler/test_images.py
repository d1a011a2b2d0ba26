"""Images in the scheduler: names of blocks, waiting for features, and features that stay until they were used."""

from dataclasses import replace
from itertools import count, islice
from random import Random
from types import SimpleNamespace

import pytest

from model_runner.contract import SamplingParams
from model_runner.images.features import FeatureCache
from model_runner.runner_interface import FeatureHolder
from scheduler.engine import Engine
from scheduler.interface import BACKGROUND, BeamSearch, ChoiceState, EngineRequest, FinishReason
from scheduler.prefix_cache import BlockChain, BlockStored, CacheLog
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import CONFIG, make_request, shares, tokens_of
from tests.scheduler.driving import run as run_all
from tests.scheduler.picturing import BROKEN, IMAGE_ID, PicturingRunner, make_image
from tests.scheduler.simulated_world import expected_output


def make_engine(num_blocks=32, log=None, limit=1 << 20, is_free=True, **settings):
    config = replace(CONFIG, **settings)
    runner = PicturingRunner(num_blocks, config.block_size, limit=limit, is_free=is_free)
    runner.sees_images = config.sees_images
    return Engine(Scheduler(config, num_blocks, cache_log=log, images=runner.images), runner)


def pictured(name, *images, num_prompt=20, max_tokens=4, n=1):
    """A request whose prompt has ascending tokens around these images, each (content, place, rows)."""
    choices = tuple(ChoiceState(index) for index in range(n))
    request = EngineRequest(f":{name}", tuple(range(num_prompt)), SamplingParams(seed=1), max_tokens, choices)
    made = tuple(make_image(content, (place, rows)) for content, place, rows in images)
    prompt = list(request.prompt)
    for image in made:
        prompt[image.start : image.end] = [IMAGE_ID] * image.num_rows
    return replace(request, prompt=tuple(prompt), images=made)


def check(outputs, *requests):
    for request in requests:
        for choice in request.choices:
            found = outputs[request.request_id, choice.index]
            assert tokens_of(found) == expected_output(request, choice.index)[0], request.request_id


def step_until(engine, is_true):
    """Step until this holds; the engine waits for images where it has nothing else to do."""
    outputs = []
    while not is_true():
        outputs += engine.step()
    return outputs


def test_same_text_with_other_images_is_another_text():
    engine = make_engine(num_blocks=200)
    requests = [pictured(f"{i}", (bytes([i]), 6, 9)) for i in range(16)]
    check(run_all(engine, *requests), *requests)
    again = [replace(request, request_id=f":again{i}") for i, request in enumerate(requests)]
    outputs = run_all(engine, *again)
    check(outputs, *again)
    assert {outputs[one.request_id, 0][0].num_cached_tokens for one in again} == {16}
    assert len(engine.runner.encoded) == 16


@pytest.mark.parametrize("size", [1, 3, 4])
def test_names_of_blocks_have_digests_places_and_rows(size):
    def names(*images, kind=b""):
        tokens = [IMAGE_ID] * 12
        return tuple(BlockChain("", size, kind, [make_image(*image) for image in images]).names(tokens, 0, 12 // size))

    whole, parted = names((b"a", (2, 8))), names((b"a", (2, 4), (6, 4)))
    others = [names(), names((b"b", (2, 8))), names((b"a", (3, 8))), names((b"a", (2, 4)), (b"a", (6, 4)))]
    others += [names((b"a", (2, 4)), (b"b", (6, 4))), names((b"b", (2, 4)), (b"a", (6, 4))), names((b"a", (2, 4)))]
    assert len({whole, *others}) == len(others) + 1
    num_before = 2 // size  # whole blocks of text
    assert all(one[:num_before] == whole[:num_before] for one in others)
    assert parted[-1] != others[-1][-1]


def test_each_byte_of_a_digest_counts():
    image = make_image(b"a", (0, 4))
    digests = [bytes(32), *(bytes(place) + b"\1" + bytes(31 - place) for place in range(32))]
    images = [replace(image, digest=one) for one in digests]
    assert len({BlockChain("", 4, b"", [one]).names([IMAGE_ID] * 4, 0, 1)[0] for one in images}) == 33
    features = FeatureCache(lambda one: one.digest, 1, 1 << 20)
    features.hold(FeatureHolder("all"), images)
    while not features.is_ready("all"):
        features.wait(60.0)
    assert [features.rows("", one) for one in images] == digests
    features.close()


def test_blocks_with_and_after_images_are_in_no_event():
    log = CacheLog()
    engine = make_engine(log=log)
    run_all(engine, pictured("a", (b"a", 10, 5)))
    stored = [event for event in log.take() if isinstance(event, BlockStored)]
    assert [event.tokens for event in stored] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_others_run_while_an_image_is_encoded():
    engine = make_engine(is_free=False)
    held, free = pictured("held", (b"a", 2, 3)), make_request("free")
    engine.add(held)
    engine.add(free)
    outputs = step_until(engine, lambda: not engine.scheduler.explain(":free"))
    assert tokens_of(outputs) == expected_output(free, 0)[0]
    assert {key for plan in engine.runner.plans for key in shares(plan)} == {"free/0"}
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.images.waiting) == (1, 0, 1)
    engine.check_integrity()
    engine.runner.gate.release()
    outputs = step_until(engine, lambda: not engine.has_work)
    assert tokens_of(outputs) == expected_output(held, 0)[0]
    assert engine.stats().images.held_bytes == 0


def test_an_image_whose_rows_are_cached_is_not_encoded():
    engine = make_engine(limit=0, num_blocks=64)
    first = pictured("first", (b"a", 2, 5), (b"b", 9, 4), num_prompt=30)
    check(run_all(engine, first), first)
    more = replace(
        pictured("more", (b"a", 2, 5), (b"b", 9, 4), (b"c", 33, 4), num_prompt=40), prompt=first.prompt + (7,) * 10
    )
    check(run_all(engine, more), more)
    assert engine.runner.encoded == [b"a", b"b", b"c"]


def test_an_image_is_encoded_once_for_all_and_once_for_each_salt():
    engine = make_engine(num_blocks=200, prefix_caching=False)
    same = [pictured(f"{i}", (b"a", 2, 5)) for i in range(5)]
    salted = [
        replace(pictured("", (b"a", 2, 5)), request_id=f"{salt}:{i}", cache_salt=salt)
        for salt in "xy"
        for i in range(2)
    ]
    check(run_all(engine, *same, *salted), *same, *salted)
    assert engine.runner.encoded == [b"a"] * 3


def test_a_broken_image_fails_its_request_alone():
    engine = make_engine()
    good, bad = pictured("good", (b"a", 2, 5)), pictured("bad", (b"a", 2, 5), (BROKEN, 9, 4), n=2)
    search = replace(pictured("search", (BROKEN, 9, 4)), beam_search=BeamSearch(2))
    outputs = run_all(engine, bad, good, search)
    check(outputs, good)
    for key in ((":bad", 0), (":bad", 1), (":search", 0)):
        (only,) = outputs[key]
        assert (only.finish_reason, only.error.message) == (FinishReason.ERROR, "the image is broken")
        assert only.error.by_request
    assert engine.stats().images.held_bytes == 0


def test_requests_are_aborted_at_any_time():
    engine = make_engine(is_free=False)
    encoding, waiting, ready = (pictured(name, (name.encode(), 2, 5)) for name in ("encoding", "waiting", "ready"))
    engine.add(encoding)
    engine.add(waiting)
    engine.step()
    assert engine.runner.begun.wait(60)
    assert len(engine.abort(":encoding")) == len(engine.abort(":waiting")) == 1
    assert not engine.has_work
    engine.check_integrity()
    engine.add(ready)
    for _ in range(2):
        engine.runner.gate.release()
    outputs = step_until(engine, lambda: not engine.has_work)
    assert tokens_of(outputs) == expected_output(ready, 0)[0]
    assert engine.runner.encoded == [b"encoding", b"ready"]


def many_images(name, number, **fields):
    """A request with so many images of four rows."""
    images = [(f"{name}{index}".encode(), 1 + 5 * index, 4) for index in range(number)]
    return replace(pictured(name, *images, num_prompt=5 * number + 2), **fields)


@pytest.mark.parametrize(
    ("others", "order"),
    [
        ({"client": "b"}, [b"a0", b"b0", b"a1"]),  # another client's image waits for one
        ({"client": "a"}, [b"a0", b"b0", b"a1"]),  # and so does another request's of the same client
        ({"client": "b", "tier": BACKGROUND}, [b"a0", b"a1", b"a2", b"a3", b"b0"]),
    ],
)
def test_a_request_with_many_images_delays_others_by_one(others, order):
    engine = make_engine(num_blocks=64, is_free=False)
    requests = [many_images("a", 4, client="a"), many_images("b", 1, **others)]
    for request in requests:
        engine.add(request)
        engine.step()
    outputs = []
    for number in range(1, 6):
        engine.runner.gate.release()
        outputs += step_until(engine, lambda number=number: engine.stats().images.encoded == number)
    outputs += step_until(engine, lambda: not engine.has_work)
    assert engine.runner.encoded[: len(order)] == order
    for request in requests:
        assert (
            tokens_of([one for one in outputs if one.request_id == request.request_id])
            == (expected_output(request, 0)[0])
        )


def test_what_a_client_got_alone_does_not_count_against_it(monkeypatch):
    seconds = SimpleNamespace(perf_counter=count().__next__)  # each image takes one
    monkeypatch.setattr("model_runner.images.features.time", seconds)
    engine = make_engine(num_blocks=64, is_free=False)
    for request in (
        many_images("a", 4, client="a"),
        *(many_images(name, number, client=name[0]) for name, number in (("b", 3), ("again", 1))),
    ):
        engine.add(request)
        engine.step()
        if request.request_id == ":a":
            for _ in range(4):
                engine.runner.gate.release()
            step_until(engine, lambda: not engine.has_work)
    for _ in range(4):
        engine.runner.gate.release()
    step_until(engine, lambda: not engine.has_work)
    assert engine.runner.encoded[4:] == [b"b0", b"again0", b"b1", b"b2"]


def test_clients_that_are_gone_are_forgotten():
    features = FeatureCache(lambda one: one.digest, 1, 1 << 20)
    for number in range(200):  # the second one comes while the first one waits, so there is never nothing to do
        for index in range(2):
            image = make_image(f"{number}-{index}".encode(), (0, 4))
            features.hold(
                FeatureHolder(f"{number}-{index}", client=f"{number}-{index}", weight=1 + number % 3), [image]
            )
        for index in range(2):
            while not features.is_ready(f"{number}-{index}"):
                features.wait(60.0)
            features.release(f"{number}-{index}")
    features.close()
    assert len(features._served) < 20


def test_a_client_leaves_half_of_the_memory_to_others():
    engine = make_engine(num_blocks=64, is_free=False, limit=16)
    for request in (*(many_images(f"a{i}", 2, client="a") for i in range(3)), many_images("b", 1, client="b")):
        engine.add(request)
        engine.step()
    for _ in range(2):
        engine.runner.gate.release()
    step_until(engine, lambda: not engine.scheduler.explain(":b"))
    assert engine.runner.encoded == [b"a00", b"b0"]
    for _ in range(5):
        engine.runner.gate.release()
    step_until(engine, lambda: not engine.has_work)


def test_features_have_bounded_memory_and_nobody_starves():
    engine = make_engine(limit=10, prefix_caching=False, num_blocks=60)
    large = pictured("large", (b"a", 2, 8), (b"b", 12, 7))
    small = [pictured(f"{i}", (bytes([i]), 2, 4)) for i in range(6)]
    order = [*small[:2], large, *small[2:]]
    for request in order:
        engine.add(request)
    firsts, most = [], 0
    while engine.has_work:
        for output in engine.step():
            if output.request_id not in firsts:
                firsts.append(output.request_id)
        most = max(most, engine.stats().images.held_bytes)
        engine.check_integrity()
    assert firsts.index(":large") == 2
    assert most == 15  # one choice alone may hold more than the limit
    assert engine.stats().images.cached_bytes <= 10


@pytest.mark.parametrize("sees_images", [False, True])
@pytest.mark.parametrize("limit", [0, 8, 1 << 20])
def test_answers_do_not_depend_on_the_rest(limit, sees_images):
    """Chunks, preemption, drafts, choices, guides and a tiny feature cache; rows of images that see each other."""
    random = Random(limit)
    engine = make_engine(
        num_blocks=20, limit=limit, max_num_batched_tokens=9, max_model_len=60, prefix_caching=limit != 8
    )
    engine.runner.num_draft = 3
    requests = []
    for number in range(40):
        contents = [bytes([random.randrange(4)]) for _ in range(random.randrange(3))]
        images = [
            (content, 1 + 10 * i + random.randrange(4), 1 + random.randrange(7)) for i, content in enumerate(contents)
        ]
        request = pictured(f"{number}", *images, num_prompt=24, max_tokens=12, n=1 + number % 3)
        if number % 5 == 1:
            sampling = replace(request.sampling, guidance=2.0)
            request = replace(request, guide=(1, 2, 3), choices=request.choices[:1], sampling=sampling)
        requests.append(request)
    outputs = {}
    waiting = list(requests)
    while engine.has_work or waiting:
        if waiting and random.random() < 0.8:
            engine.add(waiting.pop())
        for output in engine.step():
            outputs.setdefault((output.request_id, output.choice), []).append(output)
        engine.check_integrity()
        while engine.stats().images.waiting:  # or preemptions would depend on the thread's speed
            engine.runner.images.wait(60.0)
    check(outputs, *requests)
    stats = engine.stats()
    assert stats.preemptions > 5
    assert stats.images.held_bytes == 0
    assert stats.images.cached_bytes <= limit


def test_a_resumed_request_brings_its_images_again():
    request = pictured("a", (b"a", 6, 9), max_tokens=8)
    tokens = expected_output(request, 0)[0]
    resumed = replace(request, choices=(ChoiceState(0, tuple(tokens[:3])),))
    assert tokens_of(run_all(make_engine(), resumed)[":a", 0]) == tokens[3:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"images": (make_image(b"a", (2, 4)), make_image(b"b", (5, 4)))}, "not in order"),
        ({"images": (make_image(b"a", (2, 4)), make_image(b"b"))}, "not in order"),
        ({"images": (make_image(b"a", (18, 4)),)}, "outside of its 20 prompt tokens"),
    ],
)
def test_images_that_do_not_fit_their_prompt_are_refused(settings, message):
    request = replace(pictured("a"), **settings)
    with pytest.raises(ValueError, match=message):
        make_engine().add(request)


def test_a_runner_without_images_refuses_them():
    scheduler = Scheduler(CONFIG, 32)
    with pytest.raises(ValueError, match="takes none"):
        scheduler.add(EngineRequest("a", (1, 2), SamplingParams(), 1, images=(make_image(b"a", (0, 1)),)))


@pytest.mark.parametrize("place", range(33))
def test_rows_that_see_each_other_are_computed_in_one_step(place):
    """The budget is as large as the image, and others take a part of it in every step."""
    engine = make_engine(num_blocks=64, max_num_batched_tokens=7, sees_images=True)
    others = [make_request(f"other{i}", max_tokens=4) for i in range(2)]
    request = pictured("a", (b"a", place, 7), num_prompt=41)
    check(run_all(engine, *others, request), *others, request)
    again = replace(request, request_id=":again")  # what is cached may end within the image
    engine.scheduler._blocks.own.release(engine.scheduler._blocks.own.allocate(56))
    check(run_all(engine, again), again)


def test_an_image_that_sees_itself_waits_for_no_gap_among_others():
    engine = make_engine(num_blocks=64, max_num_batched_tokens=8, max_model_len=64, sees_images=True)
    found = (EngineRequest(f":{seed}", (0, 1), SamplingParams(seed=seed), 40) for seed in range(99))
    others = list(islice((one for one in found if expected_output(one, 0)[2] is FinishReason.LENGTH), 4))
    for request in others:
        engine.add(request)
    engine.step()
    picture = pictured("a", (b"a", 1, 8), num_prompt=10, max_tokens=1)
    features = engine.runner.images
    features.hold(FeatureHolder("test", picture.cache_salt), picture.images)
    while not features.is_ready("test"):
        features.wait(60.0)
    engine.add(picture)
    outputs = []
    while not any(output.request_id == ":a" for output in outputs):
        outputs = engine.step()
    assert sum(not engine.scheduler.explain(other.request_id) for other in others) == 0


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ((b"a", 3, 9), "max_num_batched_tokens is 8"),
        ((b"a", 16, 4), "must be followed by text"),
    ],
)
def test_images_that_see_themselves_must_fit_a_step(image, message):
    with pytest.raises(ValueError, match=message):
        make_engine(sees_images=True, max_num_batched_tokens=8).add(pictured("a", image))
