package node

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// maxShownVMs is the maximum number of VMs that `trivet host show` lists.
const maxShownVMs = 1000

func showCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "show HOST", Short: "Show a host and, to operators, its VMs", Args: session.Exactly("HOST"),
		ValidArgsFunction: session.FirstArg(hosts.Names(s))}
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := Find(ctx, conn, name)
		if err != nil {
			return err
		}
		n, err := vmv1.NewNodeServiceClient(conn).GetNode(ctx, &vmv1.GetNodeRequest{NodeId: id})
		if err != nil {
			return err
		}
		return s.Print(n, []string{n.GetName()}, func(w io.Writer) error {
			if err := show.Fields(w, fields(s.Now(), n)); err != nil {
				return err
			}
			if err := showDrain(ctx, w, s.Form, conn, id); err != nil {
				return err
			}
			vms, more, err := lookup.AllProjects(ctx, s, conn, fmt.Sprintf("node_id = %q", id), maxShownVMs)
			if status.Code(err) == codes.PermissionDenied {
				return nil // only operators may list the VMs of all projects
			}
			if err != nil {
				return err
			}
			if more {
				s.Note("the host has more VMs: `trivet vm list --all-projects --filter 'node_id = %q'` lists all", id)
			}
			return printVMs(w, s.Form, s.Now(), vms)
		})
	})
	return c
}

// showDrain prints the drain of a host, if the caller may read it.
func showDrain(ctx context.Context, w io.Writer, form show.Form, conn *dial.Conn, id string) error {
	d, err := operatorv1.NewOperatorServiceClient(conn).GetDrain(ctx, &operatorv1.GetDrainRequest{NodeId: id})
	switch status.Code(err) {
	case codes.PermissionDenied: // only operators may read it
		return nil
	case codes.Unimplemented: // the members are older than this program
		return nil
	case codes.OK:
		return printDrain(w, form, d.GetDrain())
	}
	return err
}

// printVMs prints the VMs that are placed on a host, those with the most memory first.
func printVMs(w io.Writer, form show.Form, now time.Time, vms []*vmv1.VirtualMachine) error {
	if len(vms) == 0 {
		_, err := fmt.Fprintln(w, "\nNo VMs are placed on the host.")
		return err
	}
	slices.SortStableFunc(vms, func(a, b *vmv1.VirtualMachine) int {
		return cmp.Compare(b.GetSpec().GetMemory().GetSizeMib(), a.GetSpec().GetMemory().GetSizeMib())
	})
	header := []string{"VM", "TENANT", "STATE", "VCPUS", "MEMORY", "CHANGED"}
	if form == show.Wide {
		header = append(header, "ERROR")
	}
	rows := make([][]string, len(vms))
	for i, vm := range vms {
		rows[i] = []string{
			vm.GetName(), vm.GetOrgId() + "/" + vm.GetProjectId(), show.Enum("VM_STATE", vm.GetState()),
			strconv.FormatUint(uint64(vm.GetSpec().GetCpu().GetVcpus()), 10), show.Bytes(vm.GetSpec().GetMemory().GetSizeMib() << 20),
			show.Age(now, vm.GetUpdatedAt()), vm.GetStatus().GetLastError(),
		}[:len(header)]
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return show.Rows(w, header, rows)
}

func fields(now time.Time, n *vmv1.Node) [][2]string {
	var hypervisors, drivers []string
	for _, h := range n.GetHypervisors() {
		hypervisors = append(hypervisors, show.Enum("HYPERVISOR_TYPE", h))
	}
	for _, d := range n.GetSupportedVolumeDrivers() {
		drivers = append(drivers, show.Enum("VOLUME_DRIVER_KIND", d))
	}
	f := [][2]string{
		{"Name", n.GetName()},
		{"ID", n.GetId()},
		{"State", stateAndWhy(now, n)},
		{"Heartbeat", lastHeartbeat(now, n)},
		{"Agent", n.GetAgentVersion()},
		{"Hypervisors", strings.Join(hypervisors, ", ")},
		{"Capacity", amount(n.GetCapacity())},
		{"Allocatable", amount(n.GetAllocatable())},
		{"Allocated", amount(n.GetAllocated())},
	}
	if free := freeAmount(n); free != "" {
		f = append(f, [2]string{"Free", free})
	}
	f = append(f,
		[2]string{"Volume drivers", strings.Join(drivers, ", ")},
		[2]string{"Storage classes", strings.Join(n.GetSupportedStorageClasses(), ", ")},
	)
	for _, k := range slices.Sorted(maps.Keys(n.GetLabels())) {
		f = append(f, [2]string{"Label " + k, n.GetLabels()[k]})
	}
	return f
}

// stateAndWhy returns the state of a host. For NOT_READY it adds the reason, and for other states the meaning.
func stateAndWhy(now time.Time, n *vmv1.Node) string {
	text := show.Enum("NODE_STATE", n.GetState())
	switch n.GetState() {
	case vmv1.NodeState_NODE_STATE_NOT_READY:
		if n.GetLastHeartbeat() == 0 {
			return text + ": its agent has sent no heartbeat"
		}
		return text + ": its agent has sent no heartbeat for " + show.Age(now, n.GetLastHeartbeat())
	case vmv1.NodeState_NODE_STATE_CORDONED:
		return text + ": no VMs are placed on it until `trivet host uncordon`"
	case vmv1.NodeState_NODE_STATE_DRAINING:
		return text + ": the VMs that run on it are moved to other hosts"
	case vmv1.NodeState_NODE_STATE_MAINTENANCE:
		return text + ": no VM runs on it, and none can be started until `trivet host uncordon`"
	}
	return text
}

func amount(c *vmv1.NodeCapacity) string {
	if c == nil { // the caller has no right to read it
		return ""
	}
	return fmt.Sprintf("%d vCPUs, %s memory, %s storage", c.GetVcpus(), show.Bytes(c.GetMemoryMib()<<20), show.Bytes(c.GetStorageGib()<<30))
}

// freeAmount returns the capacity that can still be allocated, or "" if the caller has no right to read it.
func freeAmount(n *vmv1.Node) string {
	all, used := n.GetAllocatable(), n.GetAllocated()
	if all == nil {
		return ""
	}
	return amount(&vmv1.NodeCapacity{
		Vcpus:      all.GetVcpus() - min(used.GetVcpus(), all.GetVcpus()),
		MemoryMib:  all.GetMemoryMib() - min(used.GetMemoryMib(), all.GetMemoryMib()),
		StorageGib: all.GetStorageGib() - min(used.GetStorageGib(), all.GetStorageGib()),
	})
}
