package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
	"github.com/trivet-cloud/trivet/e2e/kvbench/subject"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	// stallFor is the time for which writes to the leader's file system are blocked.
	stallFor = 2 * time.Second
	// imageBytes is the size of the file system that holds a member's data.
	imageBytes = 1 << 30
	leaseTTL   = 5 // TTL of each lease in seconds
	leases     = 60
)

// mountImages mounts a file system of its own, from an image file, over each member's data directory, so that freeze
// can block the writes of one member. undo unmounts them.
func mountImages(ctx context.Context, t *turn) (undo func() error, err error) {
	var mounted []string
	undo = func() error {
		// The caller's context may have ended: use a new one.
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		var errs []error
		for _, dir := range mounted {
			// Try repeatedly, because the last threads of a killed server may still be exiting in the kernel.
			errs = append(errs, lab.Until(ctx, dir+" is unmounted", func(ctx context.Context) error { return command(ctx, "umount", dir) }))
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, undo())
		}
	}()
	for id := 1; id <= subject.Members; id++ {
		dir := t.trio.DataDir(id)
		if err := mountImage(ctx, filepath.Join(t.trio.Dir(), fmt.Sprintf("image-%d", id)), dir); err != nil {
			return nil, err
		}
		mounted = append(mounted, dir)
	}
	return undo, nil
}

// mountImage creates an ext4 file system in the file image and mounts it over a directory. The root of the file system
// gets the owner and mode of that directory.
func mountImage(ctx context.Context, image, dir string) error {
	was, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(image, imageBytes); err != nil {
		return err
	}
	if err := command(ctx, "mkfs.ext4", "-q", image); err != nil {
		return err
	}
	if err := command(ctx, "mount", "-o", "loop", image, dir); err != nil {
		return err
	}
	owner, ok := was.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("a directory without an owner")
	}
	// The servers require that their data directory is empty.
	if err := os.Remove(filepath.Join(dir, "lost+found")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return errors.Join(os.Chown(dir, int(owner.Uid), int(owner.Gid)), os.Chmod(dir, was.Mode().Perm()))
}

func command(ctx context.Context, name string, args ...string) error {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// freezer is a shell script that freezes the file system $1, prints "frozen", thaws it after $2 seconds, and prints
// "thawed". It ignores HUP, INT and TERM, so that it thaws the file system even if kvbench dies.
const freezer = `trap '' HUP INT TERM; fsfreeze -f "$1" || exit 1; echo frozen; sleep "$2"; fsfreeze -u "$1" || exit 1; echo thawed`

// freeze blocks all writes to the file system of a directory for the time length, and returns when writes are possible
// again. It calls began when writes are blocked.
func freeze(dir string, length time.Duration, began func()) (err error) {
	cmd := exec.Command("sh", "-c", freezer, "freezer", dir, fmt.Sprintf("%g", length.Seconds()))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("freeze: %w", err)
	}
	// Thaw in case the script was killed. The error is ignored, because fsfreeze fails if nothing is frozen.
	defer func() { _ = exec.Command("fsfreeze", "-u", dir).Run() }()
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if lines.Text() == "frozen" {
			began()
		}
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("freeze: %w", err)
	}
	return nil
}

// stall blocks writes to the leader's file system for stallFor, and measures the longest time in which no put succeeded
// and the number of leases that were lost although clients kept them alive.
func stall(ctx context.Context, t *turn) error {
	const (
		puts = 50              // the number of puts per second, sent to the members in rotation
		calm = 2 * time.Second // the time with puts but without a stall at the beginning
		// after is the time with puts after the stall, long enough for leases that are not kept alive to expire.
		after = (leaseTTL + 3) * time.Second
	)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	ids, err := t.keepLeases(ctx)
	if err != nil {
		return err
	}
	open := load.StartOpen(ctx, puts, func(ctx context.Context, i int) error {
		ctx, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		_, err := t.clients[i%len(t.clients)].Put(ctx, load.Key(i%1000), load.Stamp(time.Now(), valueBytes))
		return err
	})
	if err := sleep(ctx, calm); err != nil {
		_, stopped := open.Stop()
		return errors.Join(err, stopped)
	}
	from := time.Now()
	var frozen time.Time
	err = freeze(t.trio.DataDir(t.leader), stallFor, func() { frozen = time.Now() })
	thawed := time.Now()
	err = errors.Join(err, sleep(ctx, after))
	until := time.Now()
	all, stopped := open.Stop()
	if err := errors.Join(err, stopped); err != nil {
		return err
	}
	gap := all.LongestGap(from, until)
	failed, first := all.Failed()
	lost, err := t.lostLeases(ctx, ids)
	if err != nil {
		return err
	}
	t.add("stall", "gap", ms(gap))
	t.add("stall", "leases", float64(lost))
	t.add("stall", "failed", float64(failed))
	report.Say("stall of %s, %s: no commit for %s at most; %d leases lost; %d of %d puts failed (%v)", thawed.Sub(frozen).Round(time.Millisecond), t.kind,
		gap.Round(time.Millisecond), lost, failed, len(all), first)
	_, err = t.trio.PIDs()
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// keepLeases grants leases, attaches a key to each, and keeps them alive until ctx ends, a third of them through each
// member.
func (t *turn) keepLeases(ctx context.Context) (ids []clientv3.LeaseID, err error) {
	for i := range leases {
		c := t.clients[i%len(t.clients)]
		granted, err := c.Grant(ctx, leaseTTL)
		if err != nil {
			return nil, fmt.Errorf("grant a lease: %w", err)
		}
		if _, err := c.Put(ctx, fmt.Sprintf("leased-%d", i), "here", clientv3.WithLease(granted.ID)); err != nil {
			return nil, fmt.Errorf("put with a lease: %w", err)
		}
		kept, err := c.KeepAlive(ctx, granted.ID)
		if err != nil {
			return nil, fmt.Errorf("keep a lease alive: %w", err)
		}
		go func() {
			for range kept { // the channel is closed when ctx ends or the lease is lost
			}
		}()
		ids = append(ids, granted.ID)
	}
	return ids, nil
}

// lostLeases returns the number of leases whose key does not exist any more or is not attached to them.
func (t *turn) lostLeases(ctx context.Context, ids []clientv3.LeaseID) (lost int, err error) {
	for i, id := range ids {
		r, err := t.clients[i%len(t.clients)].Get(ctx, fmt.Sprintf("leased-%d", i))
		if err != nil {
			return 0, fmt.Errorf("read a leased key: %w", err)
		}
		if len(r.Kvs) != 1 || r.Kvs[0].Lease != int64(id) {
			lost++
		}
	}
	return lost, nil
}
