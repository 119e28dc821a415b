package vm

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
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/network"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func showCommand(s *session.Session) *cobra.Command {
	c := vmsCommand(s, "show VM...", "Show VMs, with the reasons for their states and their hosts")
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		t, err := find(ctx, s, conn, name)
		if err != nil {
			return err
		}
		d, err := operatorv1.NewVmViewServiceClient(conn).GetVmDetails(ctx,
			&operatorv1.GetVmDetailsRequest{OrgId: t.org, ProjectId: t.project, VmId: t.id})
		if err != nil {
			return err
		}
		return s.Print(d.GetVm(), []string{d.GetVm().GetName()}, func(w io.Writer) error {
			// An older control plane has no GetMigration. Without it, the page has one line less.
			m, _ := migration{operatorv1.NewOperatorServiceClient(conn), t}.get(ctx)
			return printPage(w, s.Form, s.Now(), d, migrationText(m), diskColumns(ctx, s, conn),
				nicColumns(ctx, network.NewResolver(ctx, s, conn), func() string { return t.id }))
		})
	})
	return c
}

// printPage prints the page of `trivet vm show`. The parameter migration is the text about the VM's migration, or its
// last one, and is empty if the VM was never migrated.
func printPage(w io.Writer, form show.Form, now time.Time, d *operatorv1.GetVmDetailsResponse, migration string,
	disks []list.Column[*vmv1.DiskSpec], nics []list.Column[*vmv1.NetworkSpec]) error {
	spec := d.GetVm().GetSpec()
	if err := show.Fields(w, pageFields(now, d, migration)); err != nil {
		return err
	}
	if len(spec.GetDisks()) > 0 {
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
		if err := list.Print(w, disks, spec.GetDisks()...); err != nil {
			return err
		}
	}
	if len(spec.GetNetwork()) > 0 {
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
		if err := list.Print(w, nics, spec.GetNetwork()...); err != nil {
			return err
		}
	}
	return printTransitions(w, form, now, d.GetTransitions())
}

// pageFields returns the names and values at the top of the page.
func pageFields(now time.Time, d *operatorv1.GetVmDetailsResponse, migration string) [][2]string {
	vm := d.GetVm()
	spec, status := vm.GetSpec(), vm.GetStatus()
	pid := ""
	if status.GetHostPid() != 0 {
		pid = strconv.FormatUint(uint64(status.GetHostPid()), 10)
	}
	fields := [][2]string{
		{"Name", vm.GetName()},
		{"ID", vm.GetId()},
		{"Tenant", vm.GetOrgId() + "/" + vm.GetProjectId()},
		{"State", stateAndWhy(now, d)},
		{"State on host", state(status.GetActualState())},
		{"Last error", status.GetLastError()},
	}
	if d.GetWaiting() != "" {
		fields = append(fields, [2]string{"Waiting", d.GetWaiting()})
	}
	fields = append(fields, [2]string{"Host", host(vm.GetNodeId(), d.GetNodeName())})
	if p := d.GetPlacement(); p != nil {
		fields = append(fields, [2]string{"Placed", at(now, p.GetChosenAt()) + ": " + p.GetReason()})
	}
	if migration != "" {
		fields = append(fields, [2]string{"Migration", migration})
	}
	fields = append(fields,
		[2]string{"Process", pid},
		[2]string{"Started", at(now, status.GetStartedAt())},
		[2]string{"Addresses", strings.Join(without(status.GetIpAddresses(), d.GetGuestAddresses()), ", ")},
		[2]string{"vCPUs", cpu(spec.GetCpu(), d.GetCpuModel())},
		[2]string{"Memory", show.Bytes(spec.GetMemory().GetSizeMib() << 20)},
	)
	if others := d.GetGuestAddresses(); len(others) > 0 {
		fields = append(fields, [2]string{"Reported by guest", strings.Join(others, ", ")})
	}
	if text := security(spec.GetSecurity()); text != "" {
		fields = append(fields, [2]string{"Security", text})
	}
	if pending := vm.GetMetadata()[cloud.PendingResize]; pending != "" {
		fields = append(fields, [2]string{"At the next start", resizeText(pending)})
	}
	if u := status.GetResourceUsage(); u != nil {
		fields = append(fields, [2]string{"Usage", fmt.Sprintf("%.1f %% CPU, %s memory, disk %s read %s written, network %s in %s out",
			u.GetCpuPercent(), show.Bytes(u.GetMemoryUsedMib()<<20), show.Bytes(u.GetDiskReadBytes()), show.Bytes(u.GetDiskWriteBytes()),
			show.Bytes(u.GetNetworkRxBytes()), show.Bytes(u.GetNetworkTxBytes()))})
	}
	if b := spec.GetBoot(); b.GetKernel() != "" {
		fields = append(fields, [2]string{"Kernel", b.GetKernel()}, [2]string{"Initrd", b.GetInitrd()}, [2]string{"Command line", b.GetCmdline()})
	}
	policy, described := policyFields(vm)
	fields = append(fields, policy...)
	fields = append(fields, [2]string{"Created", at(now, vm.GetCreatedAt()) + " by " + vm.GetCreatedBy()}, [2]string{"Changed", at(now, vm.GetUpdatedAt())})
	for _, m := range []struct {
		name  string
		pairs map[string]string
	}{{"Label ", vm.GetLabels()}, {"Metadata ", vm.GetMetadata()}} {
		for _, k := range slices.Sorted(maps.Keys(m.pairs)) {
			if k == cloud.PendingResize || slices.Contains(described, k) {
				continue
			}
			fields = append(fields, [2]string{m.name + k, shorten(m.pairs[k])})
		}
	}
	return fields
}

// without returns the values of all that are not in some.
func without(all, some []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(a string) bool { return slices.Contains(some, a) })
}

// stateAndWhy returns the state, and the cause of the last change if it led to this state.
func stateAndWhy(now time.Time, d *operatorv1.GetVmDetailsResponse) string {
	text := state(d.GetVm().GetState())
	all := d.GetTransitions()
	if len(all) == 0 || all[len(all)-1].GetTo() != d.GetVm().GetState() {
		return text
	}
	last := all[len(all)-1]
	return fmt.Sprintf("%s: %s, %s ago", text, last.GetCause(), show.Age(now, last.GetTimestamp()))
}

// host returns the name and the ID of a host, or only one of them if the other is empty.
func host(id, name string) string {
	if name == "" || id == "" {
		return cmp.Or(name, id)
	}
	return name + " (" + id + ")"
}

// at returns a time with its distance from now, or "" if ms is 0.
func at(now time.Time, ms int64) string {
	if ms == 0 {
		return ""
	}
	return show.When(ms) + " (" + show.Age(now, ms) + " ago)"
}

// maxPageValue is the length to which shorten cuts, in characters.
const maxPageValue = 200

// shorten cuts a long value, such as a script for the guest. JSON output has the whole value.
func shorten(text string) string {
	if n := utf8.RuneCountInString(text); n > maxPageValue {
		return fmt.Sprintf("%s … (%d more characters: see -o json)", string([]rune(text)[:maxPageValue]), n-maxPageValue)
	}
	return text
}

// printTransitions prints the last changes of the state of a VM, the newest last.
func printTransitions(w io.Writer, form show.Form, now time.Time, all []*operatorv1.VmTransition) error {
	if len(all) == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	rows := make([][]string, len(all))
	for i, t := range all {
		why := t.GetCause()
		if t.GetError() != "" {
			why += ": " + t.GetError()
		}
		rows[i] = []string{show.When(t.GetTimestamp()), show.Age(now, t.GetTimestamp()), state(t.GetFrom()), state(t.GetTo()), why}
	}
	return show.WrapRows(w, form, []string{"TIME", "AGO", "FROM", "TO", "BECAUSE"}, rows)
}
