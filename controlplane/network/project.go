package network

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// CheckNone returns FailedPrecondition if the project t.Project still has VPCs, floating IPs or security groups that
// its users have created. Such a project cannot be deleted. All other network resources need a VPC. If t.Project is
// empty, CheckNone returns nil, because an org cannot be deleted while it has projects.
func CheckNone(r store.Reader, t cloud.Tenant) error {
	if t.Project == "" {
		return nil
	}
	var users []string
	all, _, err := vpcs.List(r, maxNamedUsers+1, string(t.Project))
	if err != nil {
		return err
	}
	for _, v := range all {
		users = append(users, vpcLabel(v.Value))
	}
	addresses, _, err := floatingIPs.List(r, maxNamedUsers+1, string(t.Project))
	if err != nil {
		return err
	}
	for _, f := range addresses {
		users = append(users, label(kindFloating, f.Value.Name, string(f.Value.ID)))
	}
	// One more, because the group "default" is not counted.
	own, _, err := groups.List(r, maxNamedUsers+2, string(t.Project))
	if err != nil {
		return err
	}
	for _, g := range own {
		if !g.Value.Default {
			users = append(users, label(kindGroup, g.Value.Name, string(g.Value.ID)))
		}
	}
	if len(users) == 0 {
		return nil
	}
	return inUse("project "+string(t.Project), users)
}

// ForgetProject deletes the security group "default" of a project that is being deleted. It is called after CheckNone,
// in the same transaction. Without it the project could not be deleted, because users cannot delete the group.
func ForgetProject(tx *store.Tx, t cloud.Tenant) error {
	id, err := defaultGroups.Get(tx, string(t.Project))
	if err != nil || id == nil {
		return err
	}
	g, err := find(tx, groups, kindGroup, t, string(*id))
	if err != nil {
		return err
	}
	defaultGroups.Delete(tx, string(t.Project))
	return removeGroup(tx, t, g)
}
