"""Names and the index of names, against dictionaries of whole prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefix_cache import BlockChain, PrefixCache

BLOCK_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), max_size=9).map(tuple)
SALTS = st.sampled_from(["", "a", "\ud800"])  # a lone surrogate reaches us from JSON
PROMPTS = st.lists(st.tuples(SALTS, TOKENS), max_size=12)


def names_of(salt, tokens):
    return BlockChain(salt, BLOCK_SIZE).names(tokens, 0, len(tokens) // BLOCK_SIZE)


@given(PROMPTS)
def test_names_are_equal_exactly_where_salt_and_prefix_are(prompts):
    prefix_of = {}
    name_of = {}
    for salt, tokens in prompts:
        for index, name in enumerate(names_of(salt, tokens)):
            prefix = (salt, tokens[: (index + 1) * BLOCK_SIZE])
            assert prefix_of.setdefault(name, prefix) == prefix
            assert name_of.setdefault(prefix, name) == name


@given(PROMPTS, st.sets(st.integers(0, 30)))
def test_lookup_finds_the_longest_known_prefix(prompts, forgotten):
    cache, block_of = PrefixCache(), {}
    next_block = 0
    for salt, tokens in prompts:
        for index, name in enumerate(names_of(salt, tokens)):
            cache.insert(name, next_block)
            block_of.setdefault((salt, tokens[: (index + 1) * BLOCK_SIZE]), next_block)
            next_block += 1
    for block in forgotten:
        cache.forget(block)
    block_of = {prefix: block for prefix, block in block_of.items() if block not in forgotten}
    assert cache.is_consistent()
    assert set(cache) == set(block_of.values())
    for salt, tokens in prompts:
        expected = []
        for stop in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            block = block_of.get((salt, tokens[:stop]))
            if block is None:
                break
            expected.append(block)
        assert cache.lookup(names_of(salt, tokens)) == expected


def test_a_chain_grows_with_its_tokens():
    chain, tokens = BlockChain("", BLOCK_SIZE), [1, 2, 3]
    first = chain.names(tokens, 0, 1)
    tokens += [4, 5, 6]
    assert first + chain.names(tokens, 1, 3) == names_of("", tokens)


def test_tokens_of_any_width_have_names():
    assert len({*names_of("", (2**31, 0)), *names_of("", (2**40, 0)), *names_of("", (0, 2**31))}) == 3


def test_blocks_that_hold_other_kv_have_other_names():
    """No salt of a request can make them equal, whatever it is."""
    tokens = (1, 2)
    kinds = [(b"", ""), (b"auxiliary", ""), (b"", "auxiliary"), (b"auxiliary", "auxiliary")]
    names = {BlockChain(salt, BLOCK_SIZE, kind).names(tokens, 0, 1)[0] for kind, salt in kinds}
    assert len(names) == len(kinds)
