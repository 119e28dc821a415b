package firewall

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// within runs f on an operating-system thread in the namespace ns and returns its error. Programs that f starts run in
// the namespace too. The thread ends with the call, so no other goroutine can run in the namespace.
func within(ns netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // Never unlocked: the runtime ends the thread with the goroutine.
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("enter the network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

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

// sysctls returns the settings without which the rules have no effect.
func sysctls() []sysctl {
	all := []sysctl{
		{"net/bridge/bridge-nf-call-iptables", "1", "security groups apply to bridged IPv4 packets"},
		{"net/bridge/bridge-nf-call-ip6tables", "1", "security groups apply to bridged IPv6 packets"},
		{"net/netfilter/nf_conntrack_tcp_loose", "0", "a revoked TCP connection is not re-created by its next segment"},
	}
	if mutant.On(mutant.LooseConntrack) {
		all[2].value = "1"
	}
	return all
}

// setSysctls writes those settings of the calling thread's network namespace that differ from the wanted values.
func setSysctls(r *Result) error {
	for _, s := range sysctls() {
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
