// The YAML of the configuration page: run by tests/unit/web/test_scripts.py.

import assert from "node:assert/strict";
import test from "node:test";

import { yaml } from "../yaml.js";

test("a provider looks like its part of the file", () => {
  assert.equal(yaml({ name: "east", "max-servers": 20, pools: [{ name: "main", labels: [{ name: "small", key: null }] }], tags: {}, list: [] }), [
    "name: east", "max-servers: 20", "pools:", "  - name: main", "    labels:", "      - name: small", "        key: null", "tags: {}", "list: []",
  ].join("\n"));
});

test("texts that YAML reads as something else have quotes", () => {
  for (const text of ["yes", "NO", "5", "1.5", "null", "", " x", "a: b", "a #b", "- x", "x\ny", "*", "2026-01-01", "0x1f", "~", "<img src=x>", "1e3", "a:"]) {
    assert.equal(yaml({ k: text }), `k: ${JSON.stringify(text)}`);
  }
  for (const text of ["east", "/opt/images", "noble server", "(redacted)"]) assert.equal(yaml([text]), `- ${text}`);
});
