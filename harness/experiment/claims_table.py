"""The table of verdicts on claims."""

from collections.abc import Sequence

import pandas as pd

from harness.analysis.render import Table, texts
from harness.experiment.claims import Claim, evidence, verdict
from harness.records.measures import about
from harness.records.record import Record


def claims_table(claims: Sequence[Claim], records: Sequence[Record]) -> Table:
    """Return the table of verdicts on the claims, with the numbers of their evidence."""
    names = {"claim": "text", "source": "source", "kind": "kind"}
    columns = {name: [str(getattr(claim, of)) for claim in claims] for name, of in names.items()}
    if any(claim.published for claim in claims):
        columns["published"] = [claim.published for claim in claims]
    for system, found in evidence(claims, records).items():
        on = f", simulated on {system}" if system else ""
        columns |= {
            f"verdict{on}": [verdict(one) for one in found],
            f"numbers{on}": [one.numbers if one else "" for one in found],
        }
    shown = texts(**{name: name for name in columns})
    return Table("claims", f"Claims{about(records)}", shown, pd.DataFrame(columns))
