"""No claim is vacuous: pytest with `--every-claim` fails unless its tests see each reproduced, and see it refuted.

`make test` asks for it. Of some files only: `pytest tests/experiments tests/experiment/test_claims.py --every-claim`.
"""

import sys
from typing import Any

import pytest

REFUTED = {"partly", "not reproduced", "cannot tell here"}
seen: dict[str, set[str]] = {}
"""The verdicts that tests have seen, by the text of the claim; those of xdist's workers come to their controller."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-claim", action="store_true", help="fail unless every claim is borne out and refuted")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the verdict whenever a claim is held against rows."""
    claims: Any = sys.modules.get("harness.experiment.claims")
    if claims is None or not session.config.getoption("--every-claim"):
        return
    real = claims._evidence

    def noted(claim: Any, *where: Any) -> Any:
        found = real(claim, *where)
        seen.setdefault(claim.text, set()).add(claims.verdict(found))
        return found

    claims._evidence = noted


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for text, verdicts in getattr(node, "workeroutput", {}).get("claims", {}).items():
        seen.setdefault(text, set()).update(verdicts)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["claims"] = {text: sorted(verdicts) for text, verdicts in seen.items()}
    elif session.config.getoption("--every-claim") and session.testsfailed == 0 and (missing := untried()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\n".join(["", "claims that no test both bears out and refutes:", *missing]))


def untried() -> list[str]:
    """A line for each claim whose verdict never turned."""
    from harness.experiment.loading import experiment_ids, load

    return [
        f"{name}: {claim.text}: only {', '.join(sorted(verdicts)) or 'never judged'}"
        for name in experiment_ids()
        for claim in load(name).claims
        if not ("reproduced" in (verdicts := seen.get(claim.text, set())) and verdicts & REFUTED)
    ]
