// Package program holds the set-up that the benchmark programs networkbench and storagebench share: namespaces of their
// own, a directory for the files of the run, and the check of the flags.
//
// A program calls lab.Again first. The new process calls Check, then Open, and at its end Close.
package program

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Check returns an error if a selected part is not one of the parts known, or if there is no round.
func Check(selected, known []string, rounds int) error {
	for _, part := range selected {
		if !slices.Contains(known, part) {
			return fmt.Errorf("no part %q; there are %s", part, strings.Join(known, ", "))
		}
	}
	if rounds < 1 {
		return errors.New("one round at least")
	}
	return nil
}

// Options describes the run of a program.
type Options struct {
	// Name of the program, which begins the name of Run.Dir.
	Name string
	// Work is the directory in which Open makes Run.Dir. A relative path is relative to the current directory.
	Work string
	// Paths are the other paths of flags. Open makes them absolute.
	Paths []*string
	// Mounts has the file systems to mount, by directory. A missing directory is created. The parent of a directory
	// must not be in Mounts.
	Mounts map[string]string
	// Within is the maximum time of the run.
	Within time.Duration
}

// Run is a run of a program.
type Run struct {
	// Dir is an absolute path of a directory for all files of the run. Other users can read it, because the members of
	// a control plane run under an unprivileged uid.
	Dir string
	// Context ends after Options.Within, and when the process receives SIGINT or SIGTERM.
	Context context.Context

	stop func()
}

// Open prepares the namespaces of the process, which lab.Again has made: it makes mounts private, mounts
// Options.Mounts, and brings up the interface lo. Then it makes the directory of the run.
func Open(o Options) (*Run, error) {
	if err := enter(o.Mounts); err != nil {
		return nil, err
	}
	for _, path := range append(o.Paths, &o.Work) {
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return nil, err
		}
		*path = absolute
	}
	dir, err := os.MkdirTemp(o.Work, o.Name+"-")
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, errors.Join(err, os.Remove(dir))
	}
	signals, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	ctx, cancel := context.WithTimeout(signals, o.Within)
	return &Run{Dir: dir, Context: ctx, stop: func() { cancel(); stop() }}, nil
}

func enter(mounts map[string]string) error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, dir := range slices.Sorted(maps.Keys(mounts)) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(mounts[dir], dir, mounts[dir], 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	return lab.Loopback()
}

// Close ends the context of the run and removes its directory.
func (r *Run) Close() error {
	r.stop()
	return os.RemoveAll(r.Dir)
}
