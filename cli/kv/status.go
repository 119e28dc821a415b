package kv

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// endpointStatus is the status of one endpoint, with the JSON names of etcdctl's `endpoint status`.
type endpointStatus struct {
	Endpoint string             `json:"Endpoint"`
	Status   *pb.StatusResponse `json:"Status,omitempty"`
	// Error is the reason why the endpoint has no status. etcdctl has no such field.
	Error string `json:"Error,omitempty"`
}

var (
	statusHeader = []string{"ENDPOINT", "MEMBER", "ROLE", "DB SIZE", "REVISION", "INDEX"}
	wideHeader   = []string{"ENDPOINT", "MEMBER", "ROLE", "VERSION", "DB SIZE", "IN USE", "REVISION", "TERM", "INDEX", "APPLIED", "ERRORS"}
)

func statusCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show the store as each endpoint sees it",
		Long: "Show the store as each endpoint sees it, with the error of endpoints that do not answer. `trivet cluster status` shows all members.",
		Args: session.Exactly(),
	}
	c.RunE = n.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		all, err := n.statuses(ctx, conn)
		names, rows, faults, silent := []string{}, [][]string{}, [][2]string{}, 0
		for _, s := range all {
			names = append(names, s.Endpoint)
			rows = append(rows, s.row())
			if text := s.errors(); text != "" {
				faults = append(faults, [2]string{"Error of " + s.Endpoint, text})
			}
			if s.Status == nil {
				silent++
			}
		}
		if silent == len(all) {
			return withHint(err) // if all endpoints failed, one error says more than a table of errors
		}
		if err := n.print(all, names, func(w io.Writer) error { return n.statusTable(w, rows, faults) }); err != nil || silent == 0 {
			return err
		}
		return fmt.Errorf("%d of %d endpoints returned no status", silent, len(all))
	})
	return c
}

// statusTable prints the rows. The errors of the endpoints are below the table, except in -o wide.
func (n *kvSession) statusTable(w io.Writer, rows [][]string, faults [][2]string) error {
	if n.Form == show.Wide {
		return show.Rows(w, wideHeader, rows)
	}
	short := make([][]string, len(rows))
	for i, row := range rows {
		for j, name := range wideHeader {
			if slices.Contains(statusHeader, name) {
				short[i] = append(short[i], row[j])
			}
		}
	}
	if err := show.Rows(w, statusHeader, short); err != nil || len(faults) == 0 {
		return err
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return show.Fields(w, faults)
}

// statuses requests the status of each endpoint of conn. If requests fail, the result last is the error of the last one
// that failed.
func (n *kvSession) statuses(ctx context.Context, conn *dial.Conn) (all []endpointStatus, last error) {
	for _, single := range conn.Each() {
		s := endpointStatus{Endpoint: single.Endpoint()}
		c, err := n.open(ctx, single)
		if err == nil {
			s.Status, err = c.maint.Status(ctx, &pb.StatusRequest{})
			err = clientv3.ContextError(ctx, err)
		}
		if err != nil {
			s.Status, s.Error, last = nil, err.Error(), err
		}
		all = append(all, s)
		_ = single.Close()
	}
	return all, last
}

// errors returns the error of the call or, without one, the errors in the status.
func (s *endpointStatus) errors() string {
	return cmp.Or(s.Error, strings.Join(s.Status.GetErrors(), ", "))
}

func (s *endpointStatus) row() []string {
	st := s.Status
	if st == nil {
		return []string{s.Endpoint, "", "", "", "", "", "", "", "", "", s.errors()}
	}
	role := "Follower"
	switch {
	case st.GetIsLearner():
		role = "Learner"
	case st.GetLeader() == st.GetHeader().GetMemberId():
		role = "Leader"
	case st.GetLeader() == 0:
		role = "no leader"
	}
	u := func(n uint64) string { return strconv.FormatUint(n, 10) }
	return []string{
		s.Endpoint, u(st.GetHeader().GetMemberId()), role, st.GetVersion(), show.Bytes(uint64(max(st.GetDbSize(), 0))),
		show.Bytes(uint64(max(st.GetDbSizeInUse(), 0))), number(st.GetHeader().GetRevision()), u(st.GetRaftTerm()), u(st.GetRaftIndex()),
		u(st.GetRaftAppliedIndex()), s.errors(),
	}
}

func compactCommand(n *kvSession) *cobra.Command {
	var physical bool
	c := &cobra.Command{
		Use: "compact [REVISION]", Aliases: []string{"compaction"}, Short: "Delete the history before a revision, or all of it",
		Args: session.AtMost("REVISION"),
	}
	c.Flags().BoolVar(&physical, "physical", false, "wait until it is deleted on disk")
	c.RunE = n.run(callTimeout, func(ctx context.Context, c *client, args []string) error {
		var rev int64
		var err error
		if len(args) == 1 {
			if rev, err = strconv.ParseInt(args[0], 10, 64); err != nil || rev <= 0 {
				return session.Usagef("%q: want a revision, 1 or more", args[0])
			}
		} else {
			st, err := c.maint.Status(ctx, &pb.StatusRequest{})
			if err != nil {
				return clientv3.ContextError(ctx, err)
			}
			rev = st.GetHeader().GetRevision()
		}
		var opts []clientv3.CompactOption
		if physical {
			opts = append(opts, clientv3.WithCompactPhysical())
		}
		r, err := c.keys.Compact(ctx, rev, opts...)
		if err != nil {
			return err
		}
		return n.print(r, []string{number(rev)}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "compacted to revision %d\n", rev)
			return err
		})
	})
	return c
}

func alarmCommand(n *kvSession) *cobra.Command {
	c := &cobra.Command{Use: "alarm", Short: "List and disarm alarms", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	list := &cobra.Command{Use: "list", Short: "List the alarms", Args: session.Exactly()}
	list.RunE = n.run(callTimeout, func(ctx context.Context, c *client, _ []string) error {
		r, err := c.maint.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_GET})
		if err != nil {
			return clientv3.ContextError(ctx, err)
		}
		return n.alarms(r)
	})
	disarm := &cobra.Command{Use: "disarm", Short: "Disarm all alarms", Args: session.Exactly()}
	disarm.RunE = n.run(callTimeout, func(ctx context.Context, c *client, _ []string) error {
		raised, err := c.maint.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_GET})
		for _, a := range raised.GetAlarms() {
			if err == nil {
				_, err = c.maint.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: a.GetMemberID(), Alarm: a.GetAlarm()})
			}
		}
		if err != nil {
			return clientv3.ContextError(ctx, err)
		}
		return n.alarms(raised)
	})
	c.AddCommand(list, disarm)
	return c
}

func (n *kvSession) alarms(r *pb.AlarmResponse) error {
	names, rows := []string{}, [][]string{}
	for _, a := range r.GetAlarms() {
		names = append(names, a.GetAlarm().String())
		rows = append(rows, []string{strconv.FormatUint(a.GetMemberID(), 10), a.GetAlarm().String()})
	}
	return n.print(r, names, func(w io.Writer) error { return show.Rows(w, []string{"MEMBER", "ALARM"}, rows) })
}
