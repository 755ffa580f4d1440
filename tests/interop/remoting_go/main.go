// Apache's Go client of the remoting protocol, as a producer, as consumers, or as a load. Lines of JSON
// go both ways.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"

	"github.com/apache/rocketmq-client-go/v2/rlog"
)

type line map[string]any

var writing sync.Mutex

func put(what line) {
	text, err := json.Marshal(what)
	check(err)
	writing.Lock()
	defer writing.Unlock()
	os.Stdout.Write(append(text, '\n'))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func requests() *bufio.Scanner {
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<20)
	return input
}

// complaints writes what the client logs as an error to standard error.
type complaints struct{}

func (complaints) Debug(string, map[string]interface{})   {}
func (complaints) Info(string, map[string]interface{})    {}
func (complaints) Warning(string, map[string]interface{}) {}
func (complaints) Error(text string, fields map[string]interface{}) {
	fmt.Fprintln(os.Stderr, text, fields)
}
func (complaints) Fatal(text string, fields map[string]interface{}) {
	fmt.Fprintln(os.Stderr, text, fields)
}
func (complaints) Level(string)            {}
func (complaints) OutputPath(string) error { return nil }

func main() {
	rlog.SetLogger(complaints{})
	switch os.Args[1] {
	case "produce":
		produce(os.Args[2])
	case "consume":
		consume(os.Args[2], os.Args[3:])
	case "load":
		load(os.Args[2], os.Args[3], os.Args[4])
	}
}
