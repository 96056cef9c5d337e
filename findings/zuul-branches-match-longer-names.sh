#!/bin/sh
# zuul 14.3.0 (PyPI): the attribute "branches" of a job is a regular expression that has to match only the beginning of the
# branch's name. "branches: stable/2.0", the example of the documentation, also selects stable/2.0-eol and stable/2.01, and
# "branches: main" also selects maintenance: a variant for one branch (another nodeset, voting, a secret) applies to the
# others, too. A job without the attribute, which gets the name of its own branch implicitly, applies to that branch only.
# Seen: "stable/2.0 selects stable/2.0 stable/2.0-eol stable/2.01; ^stable/2\.0$ selects stable/2.0; implied: stable/2.0".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# The dependencies of all of Zuul are not needed for its matchers.
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps zuul==14.3.0 google-re2==1.1.20251105
cat >"$work/run.py" <<'END'
from types import SimpleNamespace

from zuul.change_matcher import BranchMatcher, ImpliedBranchMatcher
from zuul.lib.re2util import ZuulRegex

BRANCHES = ("main", "stable/2.0", "stable/2.0-eol", "stable/2.01")


def selected(matcher, pattern):
    found = matcher(ZuulRegex(pattern))
    return " ".join(name for name in BRANCHES if found.matches(SimpleNamespace(branch=name)))


exact = r"^stable/2\.0$"
print(
    f"stable/2.0 selects {selected(BranchMatcher, 'stable/2.0')}; {exact} selects {selected(BranchMatcher, exact)}; "
    f"implied: {selected(ImpliedBranchMatcher, 'stable/2.0')}"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='stable/2.0 selects stable/2.0 stable/2.0-eol stable/2.01'
grep -qxF "$first; ^stable/2\\.0\$ selects stable/2.0; implied: stable/2.0" "$work/seen"
