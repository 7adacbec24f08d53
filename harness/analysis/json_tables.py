"""Tables as JSON documents."""

import math
from typing import Any

from harness.analysis.render import Table, is_missing, rows_of


def as_json(table: Table) -> dict[str, Any]:
    """Return a JSON document: the columns with their SI units, and unrounded rows."""
    keys = [key for c in table.columns for key in (c.key, c.interval) if key]
    rows = [{key: _plain(row[key]) for key in keys} for row in rows_of(table.frame)]
    columns = [{"key": c.key, "header": c.header, "unit": c.si, "half_width": c.interval} for c in table.columns]
    return {"name": table.name, "title": table.title, "columns": columns, "rows": rows, "notes": list(table.notes)}


def _plain(value: Any) -> Any:
    if is_missing(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity
