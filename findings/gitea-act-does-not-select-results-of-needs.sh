#!/bin/sh
# gitea.com/gitea/act 0.261.10 (Go module), with which Gitea's runner evaluates conditions, and @actions/expressions 0.3.61
# (npm), GitHub's own evaluator: "contains(needs.*.result, 'failure')", the usual condition of a job that must fail if one
# of the others has failed, is false in Gitea's, without a message: the gate lets everything pass. There, "*" selects
# from lists only. From an object (needs, steps, matrix) it selects nothing, a second "*" does not flatten lists, and a
# property that does not exist is not equal to null.
# Seen, with the values of GitHub and of Gitea: "contains(needs.*.result, 'failure'): true, false", "contains(matrix.*, 'arm'):
# true, false", "contains(github.event.commits.*.added.*, 'ci/a'): true, false", "matrix.gpu != null: false, true".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GOPATH="$work/go" GOCACHE="$work/cache" GOFLAGS=-modcacherw CGO_ENABLED=0
cd "$work"
npm install --silent --no-audit --no-fund --cache "$work/npm" @actions/expressions@0.3.61
cat >expressions <<'END'
contains(needs.*.result, 'failure')
contains(matrix.*, 'arm')
contains(github.event.pull_request.labels.*.name, 'urgent')
contains(github.event.commits.*.added.*, 'ci/a')
matrix.gpu != null
END
cat >contexts.json <<'END'
{
  "github": {"event": {
    "commits": [{"added": ["README", "ci/a"]}, {"added": []}],
    "pull_request": {"labels": [{"name": "urgent"}]}
  }},
  "needs": {"lint": {"result": "success", "outputs": {}}, "test": {"result": "failure", "outputs": {}}},
  "matrix": {"cpu": "arm"}
}
END
cat >github.mjs <<'END'
import fs from "fs";
import {Evaluator, Lexer, Parser, data} from "@actions/expressions";

const contexts = JSON.parse(fs.readFileSync("contexts.json", "utf8"), data.reviver);
for (const text of fs.readFileSync("expressions", "utf8").trimEnd().split("\n")) {
  const tree = new Parser(new Lexer(text).lex().tokens, ["github", "needs", "matrix"], []).parse();
  console.log(new Evaluator(tree, contexts).evaluate().coerceString());
}
END
mkdir gitea
cat >gitea/main.go <<'END'
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/nektos/act/pkg/exprparser"
	"github.com/nektos/act/pkg/model"
)

func main() {
	text, err := os.ReadFile("../contexts.json")
	if err != nil {
		panic(err)
	}
	var contexts struct {
		Github struct{ Event map[string]interface{} }
		Needs  map[string]exprparser.Needs
		Matrix map[string]interface{}
	}
	if err := json.Unmarshal(text, &contexts); err != nil {
		panic(err)
	}
	expressions, err := os.ReadFile("../expressions")
	if err != nil {
		panic(err)
	}
	environment := &exprparser.EvaluationEnvironment{
		Github: &model.GithubContext{Event: contexts.Github.Event},
		Needs:  contexts.Needs,
		Matrix: contexts.Matrix,
	}
	interpreter := exprparser.NewInterpeter(environment, exprparser.Config{Context: "job"})
	for _, expression := range strings.Split(strings.TrimSpace(string(expressions)), "\n") {
		value, err := interpreter.Evaluate(expression, exprparser.DefaultStatusCheckNone)
		if err != nil {
			panic(err)
		}
		fmt.Println(value)
	}
}
END
cd gitea
# The module is a fork that keeps the name of its origin.
cat >go.mod <<'END'
module x

go 1.23

require github.com/nektos/act v0.0.0

replace github.com/nektos/act => gitea.com/gitea/act v0.261.10
END
go build -mod=mod -gcflags="all=-N -l" -o gitea . >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
./gitea >"$work/gitea.txt"
cd "$work"
node github.mjs >github.txt
echo "gitea.com/gitea/act 0.261.10, @actions/expressions 0.3.61"
paste -d '|' expressions github.txt gitea.txt | sed 's/^\(.*\)|\(.*\)|\(.*\)$/\1: \2, \3/' | tee seen
cmp -s seen - <<'END'
contains(needs.*.result, 'failure'): true, false
contains(matrix.*, 'arm'): true, false
contains(github.event.pull_request.labels.*.name, 'urgent'): true, true
contains(github.event.commits.*.added.*, 'ci/a'): true, false
matrix.gpu != null: false, true
END
