"""`docs/reference/vllm-compatibility.md`, from the rules that the connector applies."""

from prfaas.engine.vllm.compatibility import RULES, TESTED_DTYPES, TESTED_MODELS
from prfaas.engine.vllm.facts import TESTED_SERIES
from prfaas.engine.vllm.rule import Rule, Verdict
from tools.reference.table import code, table

_SERIES = ".".join(map(str, TESTED_SERIES))
INTRODUCTION = f"""# vLLM: what works, what is refused, what is untested

Generated from `prfaas/engine/vllm/compatibility.py` by `make docs`. [vllm.md](../vllm.md) says how to run it.

The connector reads its server's configuration before it does anything else. A server with anything of the first table
does not come up: its worker ends with exit code 2 and a message that names the setting, what was found, and what to set
instead. So no such worker joins the cluster. Of the second table the worker's log has a warning for each row; such a
server serves.

Tests run vLLM {_SERIES} on CPUs, one rank, with random weights: {", ".join(map(code, TESTED_MODELS))} in
{" and ".join(TESTED_DTYPES)}.
"""


def page() -> str:
    refused = _table("otherwise refused, because", Verdict.REFUSED)
    return "\n".join(
        [INTRODUCTION, "## Refused", "", refused, "", "## Untested", "", _table("otherwise", Verdict.UNTESTED), ""]
    )


def _table(otherwise: str, verdict: Verdict) -> str:
    rows = (_row(rule) for rule in RULES if rule.verdict is verdict)
    return table(("setting", "works", otherwise, "what to do"), rows)


def _row(rule: Rule) -> tuple[str, str, str, str]:
    setting = ", ".join(code(word) for word in rule.setting.split(", ")) if "-" in rule.setting[:2] else rule.setting
    return setting, rule.works, rule.why, rule.instead
