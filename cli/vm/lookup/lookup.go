// Package lookup finds VMs by their names, for the commands of packages vm and network. It is a package of its own
// because these two packages cannot import each other: package vm looks up subnets and ports in package network.
package lookup

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Find returns the ID of the VM with a name or ID. It makes no call for an ID. An operator can name a VM of any project
// by its ID.
func Find(ctx context.Context, s *session.Session, conn *dial.Conn, nameOrID string) (string, error) {
	if session.IsID(nameOrID) {
		s.LookUpByID(func() (org, project string, err error) {
			vms, _, err := AllProjects(ctx, s, conn, fmt.Sprintf("id = %q", nameOrID), 0)
			if err != nil {
				return "", "", err
			}
			if len(vms) == 0 {
				return "", "", session.NotFound("", "no VM has the ID %s", nameOrID)
			}
			return vms[0].GetOrgId(), vms[0].GetProjectId(), nil
		})
		return nameOrID, nil
	}
	matches, err := Matches(ctx, s, conn, nameOrID)
	if err != nil {
		return "", err
	}
	return session.One("vm", s.Scope(), nameOrID, matches)
}

// Matches returns the VMs with a name. It returns a *session.Usage error if the name is not valid.
func Matches(ctx context.Context, s *session.Session, conn *dial.Conn, name string) ([]session.Match, error) {
	// Only a valid name may be part of the filter below, where it needs no escaping.
	if err := cloud.CheckName("VM", name); err != nil {
		return nil, session.Usagef("%q is not a valid name or ID of a VM", name)
	}
	vms, _, err := All(ctx, s, conn, fmt.Sprintf("name = %q", name), 0)
	if err != nil {
		return nil, err
	}
	matches := make([]session.Match, len(vms))
	for i, vm := range vms {
		matches[i] = session.Match{ID: vm.GetId(), About: fmt.Sprintf("%s in %s/%s",
			show.Enum("VM_STATE", vm.GetState()), vm.GetOrgId(), vm.GetProjectId())}
	}
	return matches, nil
}

// All returns the VMs that a filter of ListVms selects: at most limit, or all if limit is 0. more is true if there are
// further ones.
func All(ctx context.Context, s *session.Session, conn *dial.Conn, filter string, limit int) (all []*vmv1.VirtualMachine, more bool, err error) {
	org, project := s.Tenant()
	return session.Pages(limit, func(token string) ([]*vmv1.VirtualMachine, string, error) {
		page, err := vmv1.NewVmServiceClient(conn).ListVms(ctx, &vmv1.ListVmsRequest{
			OrgId: org, ProjectId: project, PageSize: session.PageSize, PageToken: token, Filter: filter,
		})
		return page.GetVms(), page.GetNextPageToken(), err
	})
}

// AllProjects is like All for the VMs of all projects. Only operators of the cloud may call it.
func AllProjects(ctx context.Context, _ *session.Session, conn *dial.Conn, filter string, limit int) (all []*vmv1.VirtualMachine, more bool, err error) {
	return session.Pages(limit, func(token string) ([]*vmv1.VirtualMachine, string, error) {
		page, err := operatorv1.NewVmViewServiceClient(conn).ListAllVms(ctx, &operatorv1.ListAllVmsRequest{
			PageSize: session.PageSize, PageToken: token, Filter: filter,
		})
		return page.GetVms(), page.GetNextPageToken(), err
	})
}

// NameOf returns a function that returns the name of a VM of the project by its ID.
func NameOf(ctx context.Context, s *session.Session, conn *dial.Conn) func(id string) string {
	return NameIn(ctx, s, conn, false)
}

// NameIn is like NameOf. If all is true, the function returns the names of the VMs of all projects.
func NameIn(ctx context.Context, s *session.Session, conn *dial.Conn, all bool) func(id string) string {
	return session.NameOf(func() (map[string]string, error) {
		read := All
		if all {
			read = AllProjects
		}
		vms, _, err := read(ctx, s, conn, "", 0)
		names := map[string]string{}
		for _, vm := range vms {
			names[vm.GetId()] = vm.GetName()
		}
		return names, err
	})
}

// Names returns a shell completion with the names of VMs.
func Names(s *session.Session) cobra.CompletionFunc {
	return s.Names(func(ctx context.Context, conn *dial.Conn) ([]string, error) {
		vms, _, err := All(ctx, s, conn, "", session.PageSize)
		var names []string
		for _, vm := range vms {
			names = append(names, vm.GetName())
		}
		return names, err
	})
}
