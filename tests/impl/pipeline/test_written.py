"""Tables written out as a plan's schedule: read back as they were, and refused in words where they are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records.labels import labels
from impl.errors import InputError
from impl.pipeline.schedules import build, is_packaged, short
from impl.pipeline.written import written
from impl.plan import Plan
from impl.run import Run
from tests.impl.pipeline.test_schedule import VALID, cached, table


@given(st.sampled_from(VALID))
def test_a_written_table_is_read_back_as_it_was(case: tuple[str, int, int, int]):
    name, p, m, v = case
    text = written(cached(*case))
    assert text is not None
    assert is_packaged(text)
    assert build(text, p, m, v).rows == tuple(map(tuple, cached(*case).rows)), name


def test_stages_in_another_order_are_not_written():
    assert written(table("0F0 0B0 2F0 2B0 3F0 3B0", "1F0 1B0")) is None


@pytest.mark.parametrize(
    ("text", "v", "message"),
    [
        ("rows:FFIWIW", 1, "has 1 rows; valid: plan.pp 2, one for each rank"),
        ("rows:FFIWIW,FIWFIW,", 1, "has 3 rows"),
        ("rows:FFIWIW,FIWFIX", 1, "row 1 has X; valid: F, B, I, W"),
        ("rows:F1FIWIW,FIWFIW", 1, "row 0 has F1; valid: chunks 0 to 0"),
        ("v-rows:FF2,FF2", 3, "row 0 has F2; valid: chunks 0 to 1"),
        ("rows:FFIW,FIWFIW", 1, "stage 0, microbatch 1 has F; valid: F B, or F I W"),
        ("rows:FFFIWIWIW,FFFIWIWIW", 1, r"1F2 on rank|0F2 on rank 0; valid: .* microbatches 0 to 1"),
        ("rows:IWFFIW,FIWFIW", 1, "rank 0 is stuck at 0I0"),
        ("rows:FFWIWI,FIWFIW", 1, "row 0 has more W than I before; valid: as many"),
    ],
)
def test_what_is_no_table_is_refused_in_words(text: str, v: int, message: str):
    with pytest.raises(InputError, match=message):
        build(text, 2, 2, v)


def test_a_label_has_a_written_table_in_short():
    texts = "rows:FFIWIW,FIWFIW", "rows:FFIIWW,FIWFIW"
    shown = labels([Run(plan=Plan(pp=2, schedule=text)) for text in texts])
    assert shown == [f"schedule={short(text)}" for text in texts]
    assert len({*shown}) == 2
    assert max(map(len, shown)) < 25
