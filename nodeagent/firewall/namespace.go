package firewall

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// run executes a program with the given standard input and returns its standard output. The error contains what the
// program wrote to its standard error.
func run(ctx context.Context, input, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return "", fmt.Errorf("run %s: %w: %s", program, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// sysctl is a setting of the network namespace.
type sysctl struct{ name, value, why string }

// sysctls returns the settings without which the rules have no effect. looseTCP is HostVPC.LooseTCP.
func sysctls(looseTCP bool) []sysctl {
	loose := "0"
	if looseTCP || mutant.On(mutant.LooseConntrack) {
		loose = "1"
	}
	return []sysctl{
		{"net/bridge/bridge-nf-call-iptables", "1", "security groups apply to bridged IPv4 packets"},
		{"net/bridge/bridge-nf-call-ip6tables", "1", "security groups apply to bridged IPv6 packets"},
		{"net/netfilter/nf_conntrack_tcp_loose", loose, "a revoked TCP connection is not re-created by its next segment"},
	}
}

// setSysctls writes those settings of the calling thread's network namespace that differ from the wanted values.
func setSysctls(looseTCP bool, r *Result) error {
	for _, s := range sysctls(looseTCP) {
		path := "/proc/sys/" + s.name
		have, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read a setting (%s): %w", s.why, err)
		}
		if strings.TrimSpace(string(have)) == s.value {
			continue
		}
		if err := os.WriteFile(path, []byte(s.value), 0); err != nil {
			return fmt.Errorf("change a setting (%s): %w", s.why, err)
		}
		r.Writes++
	}
	return nil
}
