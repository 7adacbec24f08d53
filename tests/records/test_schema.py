"""The published JSON schema of a record: that of the code, and committed records are valid by it."""

import json
from typing import Any

import pytest

from tests.documents import ROOT
from tests.harness.calls import call

PUBLISHED: dict[str, Any] = json.loads((ROOT / "docs/record.schema.json").read_text())
FOLDERS = ("ptdp2021/pipeline_schedules/small", "ours/layernorm_outliers/small")


def test_the_published_schema_is_the_codes() -> None:
    answer = call("schema")
    assert (answer.status, json.loads(answer.output)) == (0, PUBLISHED), "lmscale schema > docs/record.schema.json"


@pytest.mark.parametrize("folder", FOLDERS)
def test_committed_records_are_valid_and_others_are_not(folder: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(PUBLISHED)
    paths = sorted((ROOT / "results" / folder / "records").glob("*.json"))
    assert paths
    for path in paths[:5]:
        document = json.loads(path.read_text())
        assert not list(check.iter_errors(document)), path
        assert list(check.iter_errors(document | {"config": document["config"] | {"modle": 1}}))
        assert list(check.iter_errors({key: value for key, value in document.items() if key != "config"}))
