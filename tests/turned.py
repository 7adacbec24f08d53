"""No claim is vacuous: pytest with `--every-claim` fails unless its tests see each reproduced, and see it refuted.

`make test` asks for it. Of some files only: `pytest tests/experiments tests/experiment/test_claims.py --every-claim`.
"""

import sys
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import pytest

REFUTED = {"partly", "not reproduced", "cannot tell here"}
seen: dict[str, set[str]] = {}
"""The verdicts that tests have seen, by experiment and claim; those of xdist's workers come to their controller."""
by_check: dict[int, tuple[Callable[..., Any], set[str]]] = {}
"""Those of this process, by the function that an experiment's file gives: claims of two have the same text."""


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
        check = unwrap(claim.check)
        by_check.setdefault(id(check), (check, set()))[1].add(claims.verdict(found))
        return found

    claims._evidence = noted


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _add(getattr(node, "workeroutput", {}).get("claims", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--every-claim"):
        return
    _add({name: sorted(by_check[id(check)][1]) for name, check in _every() if id(check) in by_check})
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["claims"] = {name: sorted(verdicts) for name, verdicts in seen.items()}
    elif session.testsfailed == 0 and (missing := untried()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\n".join(["", "claims that no test both bears out and refutes:", *missing]))


def untried() -> list[str]:
    """A line for each claim whose verdict never turned."""
    return [
        f"{name}: only {', '.join(sorted(verdicts)) or 'never judged'}"
        for name, _ in _every()
        if not ("reproduced" in (verdicts := seen.get(name, set())) and verdicts & REFUTED)
    ]


def _add(found: dict[str, list[str]]) -> None:
    for name, verdicts in found.items():
        seen.setdefault(name, set()).update(verdicts)


def _every() -> list[tuple[str, Callable[..., Any]]]:
    """Return each claim by name, with its check."""
    from harness.experiment.loading import experiment_ids, load

    return [(f"{name}: {claim.text}", unwrap(claim.check)) for name in experiment_ids() for claim in load(name).claims]
