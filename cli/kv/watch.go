package kv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/status"

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
		Use: "watch KEY [END]", Short: "Print what happens to a key, or to the keys from KEY to before END, until you interrupt",
		Long: `Print what happens to a key, or to the keys from KEY to before END, until you interrupt.

Nothing is left out: a watch whose member is lost goes on at another from where it was. With --output json each line is an
answer of the store with one event or more.`,
		Args: keyAndEnd,
	}
	span.add(c.Flags(), "watch")
	c.Flags().Int64Var(&rev, "rev", 0, "begin with this revision; 0 is what happens from now on")
	c.Flags().BoolVar(&prevKV, "prev-kv", false, "show what was there before")
	c.Flags().BoolVar(&progress, "progress-notify", false, "with --output json, tell now and then up to which revision all is told")
	c.RunE = n.run(0, func(ctx context.Context, c *client, args []string) error {
		key, opts, err := span.of(args)
		if err != nil {
			return err
		}
		// etcd's client asks again for ever. What would never go well is found out by a read first, which also says where
		// "now" is, so that a watch that changes members in its first moment leaves nothing out.
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
			if err := n.print(r, eventNames(r), func(w io.Writer) error { return events(w, r) }); err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	})
	return c
}

// outages tells a person when the watch has nobody to ask, and when it goes on.
func (n *kvSession) outages() func(error) {
	var mu sync.Mutex
	down := false
	return func(err error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil && !down:
			n.Note("the watch was interrupted, and is tried again: %s", status.Convert(err).Message())
		case err == nil && down:
			n.Note("the watch goes on")
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

// events prints one a line: what it was, at which revision, the key, the value.
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
