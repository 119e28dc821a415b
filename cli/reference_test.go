package main

import (
	"flag"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/docs/docstest"
)

// TestReference compares docs/cli with the commands of the program. Package datadriven defines the flag -rewrite.
func TestReference(t *testing.T) {
	_, root := commands(session.Shell{
		Env: func(string) string { return "" }, Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Now: time.Now,
	})
	docstest.Reference(t, "../docs/cli", root, true, flag.Lookup("rewrite").Value.String() == "true")
}
