// Check that each node belongs to at most one request at a time.
//
// Input: a line of JSON for each run, with its "seed" and its "history", as `tools/world --json` prints. An entry of
// the history is [node, taken (or released), request, invocation, response].
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"github.com/anishathalye/porcupine"
)

type action struct {
	node    string
	taken   bool
	request string
}

// The state of a node is the request that has it; empty: none.
var model = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		nodes := map[string][]porcupine.Operation{}
		for _, operation := range history {
			name := operation.Input.(action).node
			nodes[name] = append(nodes[name], operation)
		}
		var found [][]porcupine.Operation
		for _, operations := range nodes {
			found = append(found, operations)
		}
		return found
	},
	Init: func() interface{} { return "" },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		step := input.(action)
		if step.taken {
			return state == "", step.request
		}
		return state == step.request, ""
	},
}

type run struct {
	Seed    int             `json:"seed"`
	History [][]interface{} `json:"history"`
}

func check(one run) bool {
	var history []porcupine.Operation
	for _, entry := range one.History {
		history = append(history, porcupine.Operation{
			Input:  action{entry[0].(string), entry[1].(bool), entry[2].(string)},
			Call:   int64(entry[3].(float64)),
			Return: int64(entry[4].(float64)),
		})
	}
	return porcupine.CheckOperations(model, history)
}

func main() {
	lines, status := bufio.NewScanner(os.Stdin), 0
	lines.Buffer(nil, 1<<28)
	for lines.Scan() {
		var one run
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		good := check(one)
		fmt.Printf("seed %d: %d entries, linearizable: %t\n", one.Seed, len(one.History), good)
		if !good {
			status = 1
		}
	}
	if err := lines.Err(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	os.Exit(status)
}
