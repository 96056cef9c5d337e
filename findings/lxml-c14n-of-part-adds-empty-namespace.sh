#!/bin/sh
# lxml 6.1.3 (PyPI, with its own libxml2): inclusive canonicalization (method="c14n") of an element inside a tree adds
# xmlns="" to its descendants from the second level on, if all of them are in a default namespace that is declared
# above the element. The children, and the element itself, are written correctly. The same element, serialized and
# parsed on its own, is canonicalized correctly. A valid XML signature without namespace prefixes therefore fails in
# a library that canonicalizes SignedInfo in place (signxml 5.2.0; xmlsec1 1.2.37 accepts the same document).
# Seen: "in place: 4 empty declarations, on its own: 0".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check lxml==6.1.3
cat >"$work/run.py" <<'END'
from lxml import etree

document = (
    '<Signature xmlns="urn:signature"><SignedInfo><Method/><Reference><Transforms><Transform/></Transforms>'
    "<Digest>x</Digest><Value>y</Value></Reference></SignedInfo></Signature>"
)
part = etree.fromstring(document)[0]
alone = etree.fromstring(etree.tostring(part))
counts = [etree.tostring(each, method="c14n").count(b'xmlns=""') for each in (part, alone)]
print(f"in place: {counts[0]} empty declarations, on its own: {counts[1]}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx 'in place: 4 empty declarations, on its own: 0' "$work/seen"
