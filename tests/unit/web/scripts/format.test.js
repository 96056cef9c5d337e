// Formats of the pages: run by tests/unit/web/test_scripts.py.

import assert from "node:assert/strict";
import test from "node:test";

import { age, bytes, duration, moment, number, precisely, shellQuoted, use, uses } from "../format.js";

/** @param {string} name @param {(value: any) => string} format @param {[any, string][]} rows */
function table(name, format, rows) {
  test(name, () => { for (const [value, text] of rows) assert.equal(format(value), text, String(value)); });
}

table("a duration has its two largest units", duration, [
  [0, "0 s"], [-5, "0 s"], [0.121, "0.12 s"], [3.44, "3.4 s"], [7, "7 s"], [9.97, "10 s"], [59.4, "59 s"], [60, "1 min"], [187, "3 min 7 s"],
  [658.7, "10 min 59 s"], [3599.6, "1 h"], [3600, "1 h"], [3605, "1 h"], [7260, "2 h 1 min"], [90000, "1 d 1 h"], [1e9, "11,574 d 1 h"],
]);
table("a name in a command is one word for a shell", shellQuoted, [
  ["noble-4f1c", "noble-4f1c"], ["rack/1:a@b", "rack/1:a@b"], ["cloud 1", "'cloud 1'"], ["x;reboot", "'x;reboot'"], ["$(id)", "'$(id)'"], ["it's", "'it'\\''s'"], ["", "''"],
]);
table("an age has no fraction", age, [[-3, "0 s"], [0.9, "0 s"], [3.9, "3 s"], [59.99, "59 s"], [119, "1 min 59 s"]]);
table("a size has a unit of 1024", bytes, [
  [0, "0 B"], [512, "512 B"], [1536, "1.5 KiB"], [85899345920, "80 GiB"], [2 ** 40 * 1.25, "1.3 TiB"], [2 ** 20 * 150.4, "150 MiB"], [2 ** 70, "1,048,576 PiB"],
]);
table("a number has separators and few digits", number, [[0.09999999999999987, "0.1"], [70.9233, "70.9"], [10000, "10,000"], [1.0, "1"]]);

test("a limit is shown with its use in one unit", () => {
  assert.equal(use("ram", 163840, 1000000), "RAM 160 of 977 GiB");
  assert.equal(use("ram", 512, 1024), "RAM 0.5 of 1 GiB");
  assert.equal(use("disk", 70.9233, 100), "disk 70.9 of 100 GiB");
  assert.equal(use("cores", 0.1, 1.9), "cores 0.1 of 1.9");
  assert.equal(use("instances", 20, 20), "instances 20 of 20");
});

table("limits of a table are shown in units, without those of nothing", uses, [
  ["cores 0/0, instances 2/20, ram 163840/1e+06", "instances 2 of 20, RAM 160 of 977 GiB"],
  ["volumes 0/0", "volumes 0 of 0"], ["nothing known", "nothing known"], ["", ""],
]);

test("a moment has a time zone; numbers that are no dates stay numbers", () => {
  assert.match(moment(1764239942), /2025.* \S+$/);
  assert.equal(moment(1e300), "1e+300");
  assert.equal(precisely(1e300), "1e+300");
  assert.match(precisely(1764239942.125), /\.125/);
});
