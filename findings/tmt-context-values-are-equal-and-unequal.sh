#!/bin/sh
# tmt 1.78.0 with fmf 1.7.0 (PyPI): a dimension of the context may have several values, as for a node with several
# labels (--context label=small,gpu). A rule of "adjust" is then true if it is true for one of the values, also with the
# operators for "is not": "label == small" and "label != small" are both true, so that "unless the node is small" holds
# for a small node. With one value, the two exclude each other. The warning in the documentation is about several values
# on the right side only.
# Seen: "small: == is true, != is false; small,gpu: == is true, != is true".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check tmt==1.78.0 fmf==1.7.0
mkdir -p "$work/tests/.fmf"
cd "$work/tests"
echo 1 >.fmf/version
cat >main.fmf <<'END'
test: "true"
/equal:
    adjust:
      - enabled: false
        when: label == small
/unequal:
    adjust:
      - enabled: false
        when: label != small
END
export HOME="$work"
rules() {
    "$work/venv/bin/tmt" --context "label=$1" tests ls --enabled >"$work/enabled"
    equal=true; grep -qx /equal "$work/enabled" && equal=false
    unequal=true; grep -qx /unequal "$work/enabled" && unequal=false
    echo "$1: == is $equal, != is $unequal"
}
echo "$(rules small); $(rules small,gpu)" | tee "$work/seen"
grep -qx 'small: == is true, != is false; small,gpu: == is true, != is true' "$work/seen"
