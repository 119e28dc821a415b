// Package cluster holds the commands for the members of the control plane, and for its backup: `trivet cluster`.
package cluster

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

// Command returns the command `trivet cluster`.
func Command(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "cluster", Short: "Show and change the members of the control plane, and back it up", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	status := &cobra.Command{Use: "status", Short: "Show the members and the raft groups, as one member sees them", Args: session.Exactly(),
		SuggestFor: []string{"list", "ls", "member", "members", "show", "info"}}
	status.RunE = s.Run(30*time.Second, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		st, err := operatorv1.NewOperatorServiceClient(conn).ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
		if err != nil {
			return err
		}
		var names []string
		for _, m := range st.GetMembers() {
			names = append(names, id(m.GetId()))
		}
		return s.Print(st, names, func(w io.Writer) error { return table(w, s.Form, st) })
	})
	c.AddCommand(status, addCommand(s), promoteCommand(s), removeCommand(s), replaceCommand(s), transferCommand(s), tokenCommand(s), backupCommand(s),
		capacityCommand(s), rebalanceCommand(s), rollingDrainCommand(s))
	return c
}

// freeDisk formats a member's free disk space. It appends ", low" if the free space is so small that the cluster
// rejects tenants' mutating calls.
func freeDisk(m *operatorv1.Member) string {
	switch {
	case m.GetDiskSizeBytes() == 0:
		return "not known"
	case m.GetDiskLow():
		return show.Bytes(uint64(max(m.GetDiskFreeBytes(), 0))) + ", low"
	}
	return show.Bytes(uint64(max(m.GetDiskFreeBytes(), 0)))
}

func table(w io.Writer, form show.Form, st *operatorv1.ClusterStatusResponse) error {
	if err := show.Fields(w, [][2]string{
		{"Cluster", st.GetCluster()}, {"Version", st.GetVersion()}, {"Reported by", "member " + id(st.GetMemberId())},
	}); err != nil {
		return err
	}
	members, header := [][]string{}, []string{"MEMBER", "NAME", "ADDRESS", "STATE", "REACHABLE", "FREE DISK"}
	if form == show.Wide {
		header = append(header, "VERSION")
	}
	for _, m := range st.GetMembers() {
		reachable := "no"
		if m.GetReachable() {
			reachable = "yes"
		}
		members = append(members, []string{id(m.GetId()), m.GetName(), m.GetAddress(), state(m), reachable, freeDisk(m), m.GetVersion()}[:len(header)])
	}
	groups, progress := [][]string{}, [][]string{}
	for _, g := range st.GetGroups() {
		leader := "none known"
		if g.GetLeaderId() != 0 {
			leader = "member " + id(g.GetLeaderId())
		}
		groups = append(groups, []string{g.GetName(), leader, id(g.GetTerm()), id(g.GetCommittedIndex()), id(g.GetAppliedIndex()),
			strconv.FormatInt(g.GetRevision(), 10), joinIDs(g.GetVoters()), joinIDs(g.GetLearners())})
		last := uint64(0)
		for _, p := range g.GetProgress() {
			last = max(last, p.GetMatchIndex())
		}
		for _, p := range g.GetProgress() {
			active := "no"
			if p.GetActive() {
				active = "yes"
			}
			progress = append(progress, []string{g.GetName(), id(p.GetMemberId()), id(p.GetMatchIndex()), id(last - p.GetMatchIndex()), active})
		}
	}
	for _, t := range []struct {
		header []string
		rows   [][]string
	}{
		{header, members},
		{[]string{"GROUP", "LEADER", "TERM", "COMMITTED", "APPLIED", "REVISION", "VOTERS", "LEARNERS"}, groups},
		{[]string{"GROUP", "MEMBER", "REPLICATED", "LAG", "ACTIVE"}, progress},
	} {
		if len(t.rows) == 0 {
			continue
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
		if err := show.Rows(w, t.header, t.rows); err != nil {
			return err
		}
	}
	return nil
}

func id(n uint64) string { return strconv.FormatUint(n, 10) }
