"""The verb `schema`: the fields of a record, for programs that read or write them."""

from harness.records.parse import schema as of_record
from harness.terminal import print_json


def schema() -> int:
    """Print the JSON schema of a record; docs/record.schema.json is the same."""
    return print_json(of_record())
