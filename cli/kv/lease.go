package kv

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// leaseID parses a lease ID in hexadecimal, as etcdctl prints it.
func leaseID(text string) (clientv3.LeaseID, error) {
	id, err := strconv.ParseInt(text, 16, 64)
	if err != nil || id <= 0 {
		return 0, session.Usagef("%q is not a lease: want an ID in hexadecimal, as `trivet kv lease list` shows it", text)
	}
	return clientv3.LeaseID(id), nil
}

// leaseName formats a lease ID as 16 hexadecimal digits, as etcdctl does. It returns "" for 0, which means no lease.
func leaseName(id int64) string {
	if id == 0 {
		return ""
	}
	return fmt.Sprintf("%016x", id)
}

func leaseCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{Use: "lease", Short: "Grant, renew and revoke leases", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	c.AddCommand(leaseGrantCommand(n), leaseRevokeCommand(n), leaseShowCommand(n), leaseListCommand(n), leaseKeepCommand(n))
	return c
}

var leaseHeader = []string{"LEASE", "TTL"}

func leaseGrantCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{Use: "grant SECONDS", Short: "Grant a lease that expires after SECONDS, or a duration such as 5m, unless it is renewed", Args: session.Exactly("SECONDS")}
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		ttl, err := session.ParseSeconds(args[0])
		if err != nil {
			return session.Usagef("SECONDS %q: %v", args[0], err)
		}
		r, err := c.lease.Grant(ctx, ttl)
		if err != nil {
			return err
		}
		name := leaseName(int64(r.ID))
		return n.print(r, []string{name}, func(w io.Writer) error {
			return show.Rows(w, leaseHeader, [][]string{{name, seconds(r.TTL)}})
		})
	})
	return c
}

func seconds(n int64) string { return strconv.FormatInt(n, 10) + "s" }

func leaseRevokeCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{Use: "revoke LEASE", Short: "Revoke a lease and delete its keys", Args: session.Exactly("LEASE")}
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		id, err := leaseID(args[0])
		if err != nil {
			return err
		}
		r, err := c.lease.Revoke(ctx, id)
		if err != nil {
			return err
		}
		name := leaseName(int64(id))
		return n.print(r, []string{name}, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, name, "ended")
			return err
		})
	})
	return c
}

func leaseShowCommand(n *kvSession) *cobra.Command {
	var keys bool
	c := &cobra.Command{Use: "timetolive LEASE", Aliases: []string{"show"}, Short: "Show the remaining time of a lease", Args: session.Exactly("LEASE")}
	c.Flags().BoolVar(&keys, "keys", false, "show its keys too")
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		id, err := leaseID(args[0])
		if err != nil {
			return err
		}
		var opts []clientv3.LeaseOption
		if keys {
			opts = append(opts, clientv3.WithAttachedKeys())
		}
		r, err := c.lease.TimeToLive(ctx, id, opts...)
		if err != nil {
			return err
		}
		var names []string
		for _, k := range r.Keys {
			names = append(names, string(k))
		}
		err = n.print(r, names, func(w io.Writer) error {
			if r.TTL < 0 {
				return nil
			}
			fields := [][2]string{{"Lease", leaseName(int64(r.ID))}, {"Granted", seconds(r.GrantedTTL)}, {"Left", seconds(r.TTL)}}
			if keys {
				fields = append(fields, [2]string{"Keys", strings.Join(names, " ")})
			}
			return show.Fields(w, fields)
		})
		if err == nil && r.TTL < 0 {
			return session.NotFound("`trivet kv lease list` shows the existing ones", "lease %s expired or never existed", leaseName(int64(id)))
		}
		return err
	})
	return c
}

func leaseListCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "List the leases", Args: session.Exactly()}
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, _ []string) error {
		r, err := c.lease.Leases(ctx)
		if err != nil {
			return err
		}
		names, rows := []string{}, [][]string{}
		for _, l := range r.Leases {
			names = append(names, leaseName(int64(l.ID)))
			rows = append(rows, []string{leaseName(int64(l.ID))})
		}
		return n.print(r, names, func(w io.Writer) error { return show.Rows(w, leaseHeader[:1], rows) })
	})
	return c
}

func leaseKeepCommand(n *kvSession) *cobra.Command {
	var once bool
	c := &cobra.Command{Use: "keep-alive LEASE", Short: "Renew a lease until you interrupt", Args: session.Exactly("LEASE")}
	c.Flags().BoolVar(&once, "once", false, "renew it once")
	c.RunE = n.run(0, func(ctx context.Context, c *client, args []string) error {
		id, err := leaseID(args[0])
		if err != nil {
			return err
		}
		say := func(r *clientv3.LeaseKeepAliveResponse) error {
			name := leaseName(int64(r.ID))
			return n.printEvent(r, []string{name}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s has %s\n", name, seconds(r.TTL))
				return err
			})
		}
		first, cancel := n.Limit(ctx, callTimeout)
		r, err := c.lease.KeepAliveOnce(first, id)
		cancel()
		if err != nil {
			return err
		}
		if err := say(r); err != nil || once {
			return err
		}
		kept, err := c.lease.KeepAlive(ctx, id)
		if err != nil {
			return err
		}
		defer c.lease.Close()
		for r := range kept {
			if err := say(r); err != nil {
				return err
			}
		}
		return session.Interruptible(ctx, session.NotFound("", "lease %s has expired", leaseName(int64(id))))
	})
	return c
}
