package cluster

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

func capacityCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "capacity", Short: "Show what the hosts have and have allocated, and whether any one host can be lost",
		Long: `Show what each host offers to VMs and has allocated, and whether any one host can be lost: whether the other hosts have
room for its VMs that are then started elsewhere. These are the VMs with the metadata trivet/ha=restart that should run,
if all their disks are volumes that several hosts can use. VCPUS, MEMORY and STORAGE show what is allocated of what can
be allocated. IF LOST shows how many of the host's VMs would be started again elsewhere. -o wide also shows what the
hosts have, their huge pages, and how many VMs would find no host.`,
		Args: session.Exactly(),
	}
	c.RunE = s.Run(time.Minute, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		a, err := operatorv1.NewOperatorServiceClient(conn).GetCapacity(ctx, &operatorv1.GetCapacityRequest{})
		if err != nil {
			return err
		}
		var names []string
		for _, h := range a.GetHosts() {
			names = append(names, h.GetName())
		}
		return s.Print(a, names, func(w io.Writer) error { return capacityTable(w, s.Form, a) })
	})
	return c
}

// capacityTable prints the resources of the hosts, each as "allocated/allocatable". In -o wide, it also prints what the
// hosts have, and their huge pages.
func capacityTable(w io.Writer, form show.Form, a *operatorv1.GetCapacityResponse) error {
	type resource struct {
		name   string
		amount func(*operatorv1.Resources) uint64
		used   func(used, total uint64) string
		total  func(uint64) string
	}
	resources := []resource{
		{"VCPUS", (*operatorv1.Resources).GetVcpus, func(used, total uint64) string { return fmt.Sprintf("%d/%d", used, total) }, id},
		{"MEMORY", func(r *operatorv1.Resources) uint64 { return r.GetMemoryMib() << 20 }, show.Used, show.Bytes},
		{"HUGE PAGES", func(r *operatorv1.Resources) uint64 { return r.GetHugepagesMib() << 20 }, show.Used, show.Bytes},
		{"STORAGE", func(r *operatorv1.Resources) uint64 { return r.GetStorageGib() << 30 }, show.Used, show.Bytes},
	}
	wide := form == show.Wide
	if !wide {
		resources = slices.Delete(resources, 2, 3)
	}
	rows, header := [][]string{}, []string{"HOST", "STATE"}
	for _, r := range resources {
		if header = append(header, r.name); wide {
			header = append(header, "OF THE HOST")
		}
	}
	header = append(header, "IF LOST")
	row := func(name, state string, capacity, allocatable, allocated *operatorv1.Resources, loss string) {
		cells := []string{name, state}
		for _, r := range resources {
			if cells = append(cells, r.used(r.amount(allocated), r.amount(allocatable))); wide {
				cells = append(cells, r.total(r.amount(capacity)))
			}
		}
		rows = append(rows, append(cells, loss))
	}
	first := ""
	for _, h := range a.GetHosts() {
		l := h.GetLoss()
		loss := "-"
		if l != nil {
			loss = fmt.Sprintf("%d/%d restart", l.GetRecovered(), l.GetVms())
			if wide {
				loss = fmt.Sprintf("%d of %d VMs start elsewhere", l.GetRecovered(), l.GetVms())
			}
			if wide && l.GetWaiting() > 0 {
				loss += fmt.Sprintf(", %d find no host", l.GetWaiting())
			}
		}
		if first == "" && l.GetWaiting() > 0 {
			first = fmt.Sprintf("no: if %s is lost, %d VMs find no host; VM %s: %s", h.GetName(), l.GetWaiting(), l.GetFirstWaiting(), l.GetReason())
		}
		row(h.GetName(), h.GetState(), h.GetCapacity(), h.GetAllocatable(), h.GetAllocated(), loss)
	}
	row("all hosts", "", a.GetCapacity(), a.GetAllocatable(), a.GetAllocated(), "")
	if err := show.Rows(w, header, rows); err != nil {
		return err
	}
	if first == "" {
		first = "yes"
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return show.Fields(w, [][2]string{{"Any one host can be lost", first}})
}

func rebalanceCommand(s *session.Session) *cobra.Command {
	r := &operatorv1.RebalanceClusterRequest{}
	c := &cobra.Command{
		Use: "rebalance", Short: "Migrate VMs from full hosts to emptier ones, or only propose that",
		Long: `Migrate VMs from full hosts to emptier ones, one after the other; with --dry-run only list the migrations. The use of a host is the part of its scarcest resource that is
allocated. A VM is moved if the fuller of its two hosts becomes emptier by at least 5 %, and only to the host where it
would be placed now. The first migration that fails ends the command.`,
		Args: session.Exactly(),
	}
	c.Flags().BoolVar(&r.DryRun, "dry-run", false, "move nothing")
	c.Flags().Uint32Var(&r.MaxMoves, "max-moves", 0, "at most this number of moves (default 20)")
	c.RunE = s.Run(time.Hour, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		a, err := operatorv1.NewOperatorServiceClient(conn).RebalanceCluster(ctx, r)
		if err != nil {
			return err
		}
		var names []string
		for _, m := range a.GetMoves() {
			names = append(names, m.GetVmId())
		}
		return s.Print(a, names, func(w io.Writer) error { return rebalanceTable(w, s.Form, a) })
	})
	return c
}

func rebalanceTable(w io.Writer, form show.Form, a *operatorv1.RebalanceClusterResponse) error {
	percent := func(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }
	rows := [][]string{}
	for _, m := range a.GetMoves() {
		row := []string{m.GetVmName(), m.GetFrom(), m.GetTo(), percent(m.GetBefore()), percent(m.GetAfter())}
		if form == show.Wide {
			row = slices.Insert(row, 1, m.GetVmId())
		}
		rows = append(rows, row)
	}
	if len(rows) > 0 {
		header := []string{"VM", "FROM", "TO", "USE OF FULLER HOST", "AFTERWARDS"}
		if form == show.Wide {
			header = slices.Insert(header, 1, "ID")
		}
		if err := show.Rows(w, header, rows); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	return show.Fields(w, [][2]string{
		{"Moves", fmt.Sprint(len(rows))},
		{"Use of the hosts before", percent(a.GetLowestBefore()) + " to " + percent(a.GetHighestBefore())},
		{"Afterwards", percent(a.GetLowestAfter()) + " to " + percent(a.GetHighestAfter())},
	})
}
