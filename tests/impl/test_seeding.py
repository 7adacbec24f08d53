"""Seeds for purposes."""

from hypothesis import given
from hypothesis import strategies as st

from impl.seeding import derive

PARTS = st.lists(st.text(max_size=4) | st.integers(-3, 12), max_size=3)


def test_a_seed_is_the_same_forever():
    assert derive(0, "data", 3) == derive(0, "data", 3) == 572712993707798963


@given(PARTS, PARTS, st.integers(0, 2), st.integers(0, 2))
def test_other_parts_other_seed(one: list[str | int], two: list[str | int], a: int, b: int):
    same = a == b and one == two
    assert (derive(a, *one) == derive(b, *two)) == same
    assert 0 <= derive(a, *one) < 2**63


def test_a_number_is_not_its_digits():
    assert len({derive(0, 1), derive(0, "1"), derive(0, "1", ""), derive(0, 1, 1), derive(0, 11)}) == 5
