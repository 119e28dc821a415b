package usage

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// Profile starts `perf record`, which writes CPU profiles of the processes pids to a file until stop is called. It
// returns an error if perf cannot be started.
func Profile(ctx context.Context, file string, pids ...int) (stop func(), err error) {
	var list []string
	for _, pid := range pids {
		list = append(list, strconv.Itoa(pid))
	}
	cmd := exec.CommandContext(ctx, "perf", "record", "-q", "-F", "499", "-g", "-o", file, "-p", strings.Join(list, ","))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start perf: %w", err)
	}
	return func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		_ = cmd.Wait() // its error only reports the SIGINT
	}, nil
}
