package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/bench/report"
)

// verify runs BenchmarkVerify of controlplane/accounts/identity once, on one core and on two, and adds the verified
// tokens per second and core to the results.
func (b *bench) verify(ctx context.Context) error {
	length := "500ms"
	if b.Quick {
		length = "50ms"
	}
	cmd := exec.CommandContext(ctx, b.identity, "-test.run", "^$", "-test.bench", "^BenchmarkVerify$", "-test.cpu", "1,2", "-test.benchtime", length)
	cmd.Dir = b.dir
	var failure strings.Builder
	cmd.Stderr = &failure
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run identity's benchmark: %w: %s%s", err, out, failure.String())
	}
	found, err := parseVerify(string(out))
	if err != nil {
		return err
	}
	for _, v := range found {
		b.results.add(fmt.Sprintf("verify %d", v.cores), rate, v.kind, v.rate/float64(v.cores))
		report.Say("verify, %s, %d cores: %.0f/s", v.kind, v.cores, v.rate)
	}
	return nil
}

// verified is a line of the benchmark's output. rate is in tokens per second of all cores together.
type verified struct {
	kind  string
	cores int
	rate  float64
}

// verifyLine matches "BenchmarkVerify/go-oidc-2 100 12 ns/op 345 tokens/s", where -2 is the number of cores. Without
// it, the line is for one core.
var verifyLine = regexp.MustCompile(`(?m)^BenchmarkVerify/(seen|new|go-oidc|golang-jwt)(?:-(\d+))?\s.*\s([0-9.e+]+) tokens/s`)

func parseVerify(text string) (found []verified, err error) {
	for _, m := range verifyLine.FindAllStringSubmatch(text, -1) {
		v := verified{kind: m[1], cores: 1}
		if m[2] != "" {
			if v.cores, err = strconv.Atoi(m[2]); err != nil {
				return nil, fmt.Errorf("cores in %q: %w", m[0], err)
			}
		}
		if v.rate, err = strconv.ParseFloat(m[3], 64); err != nil {
			return nil, fmt.Errorf("rate in %q: %w", m[0], err)
		}
		found = append(found, v)
	}
	if len(found) == 0 {
		return nil, errors.New("identity's benchmark printed no rates")
	}
	return found, nil
}
