package kv

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

func watchCommand(n *kvSession) *cobra.Command {
	var (
		span     keyRange
		rev      int64
		prevKV   bool
		progress bool
	)
	c := &cobra.Command{
		Use: "watch KEY [END]", Short: "Print changes of a key, or of the keys in [KEY, END), until you interrupt",
		Long: `Print changes of a key, or of the keys in [KEY, END), until you interrupt.

No change is omitted: if the member fails, the watch continues at another one with the next change. With --output json
each line is a response with one or more events.`,
		Args: keyAndEnd,
	}
	span.add(c.Flags(), "watch")
	c.Flags().Int64Var(&rev, "rev", 0, "start at this revision; 0 is the next one")
	c.Flags().BoolVar(&prevKV, "prev-kv", false, "show the previous key and value")
	c.Flags().BoolVar(&progress, "progress-notify", false, "with --output json, report from time to time up to which revision all events were printed")
	c.RunE = n.run(0, func(ctx context.Context, c *client, args []string) error {
		key, opts, err := span.of(args)
		if err != nil {
			return err
		}
		// etcd's client retries a watch forever, whatever the error. Therefore read the keys first: the read reports a
		// permanent error, and returns the current revision. The watch starts there, so that it loses no event even if
		// it fails over before its first event.
		first, err := c.keys.Get(ctx, key, append([]clientv3.OpOption{clientv3.WithCountOnly()}, opts...)...)
		if err != nil {
			return err
		}
		if rev == 0 {
			rev = first.Header.GetRevision() + 1
		}
		opts = append(opts, clientv3.WithRev(rev))
		if prevKV {
			opts = append(opts, clientv3.WithPrevKV())
		}
		if progress {
			opts = append(opts, clientv3.WithProgressNotify())
		}
		c.wire.lost = n.outages()
		defer c.watch.Close()
		for r := range c.watch.Watch(ctx, key, opts...) {
			if err := r.Err(); err != nil && ctx.Err() == nil {
				return err
			}
			if err := n.printEvent(r, eventNames(r), func(w io.Writer) error { return events(w, r) }); err != nil {
				return err
			}
		}
		return session.Interruptible(ctx, ctx.Err())
	})
	return c
}

// outages returns a function for the field storeConn.lost. It prints a note when the watch is interrupted and when the
// watch continues.
func (n *kvSession) outages() func(error) {
	var mu sync.Mutex
	down := false
	return func(err error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil && !down:
			n.Note("the watch was interrupted and is being retried: %s", status.Convert(err).Message())
		case err == nil && down:
			n.Note("the watch continues")
		}
		down = err != nil
	}
}

func eventNames(r clientv3.WatchResponse) (names []string) {
	for _, e := range r.Events {
		names = append(names, string(e.Kv.GetKey()))
	}
	return names
}

// events prints the events of a response, one per line: type, revision, key, value and previous value.
func events(w io.Writer, r clientv3.WatchResponse) error {
	for _, e := range r.Events {
		line := fmt.Sprintf("%-6s  %d  %s", e.Type, e.Kv.GetModRevision(), show.Text(string(e.Kv.GetKey())))
		if e.Type == clientv3.EventTypePut {
			line += "  " + show.Text(string(e.Kv.GetValue()))
		}
		if e.PrevKv != nil {
			line += "  (was " + show.Text(string(e.PrevKv.GetValue())) + ")"
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}
