package network

import (
	"testing"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// TestDeleteProject deletes a project that has had a VPC, and so has the security group "default", which users cannot
// delete. No record of the project remains: a project that is created later with the same ID would have it.
func TestDeleteProject(t *testing.T) {
	w := newWorld(t)
	api, ctx := &server{s: w.networks}, w.as(acme, "")
	limit := uint64(10)
	w.update(func(tx *store.Tx) error {
		return tenant.SetOrgQuota(tx, acme.Org, tenant.Quota{SecurityGroups: &limit})
	})
	vpc, err := api.CreateVpc(ctx, &networkv1.CreateVpcRequest{Name: "prod", CidrBlock: "10.0.0.0/16"})
	require.NoError(t, err)
	group, err := api.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Name: "db"})
	require.NoError(t, err)
	check := func() (err error) {
		require.NoError(t, w.store.View(t.Context(), func(v *store.View) error {
			err = CheckNone(v, acme)
			return nil
		}))
		return err
	}
	require.EqualError(t, check(), "project web is used by VPC prod ("+vpc.GetId()+"), security group db ("+group.GetId()+")")
	_, err = api.DeleteVpc(ctx, &networkv1.DeleteVpcRequest{Id: vpc.GetId()})
	require.NoError(t, err)
	_, err = api.DeleteSecurityGroup(ctx, &networkv1.DeleteSecurityGroupRequest{Id: group.GetId()})
	require.NoError(t, err)
	require.NoError(t, check())

	w.update(func(tx *store.Tx) error {
		if err := ForgetProject(tx, acme); err != nil {
			return err
		}
		return tenant.DeleteProject(tx, acme.Project)
	})
	require.Empty(t, w.records())
	require.NoError(t, w.store.View(t.Context(), func(v *store.View) error {
		used, err := tenant.OrgUsed(v, acme.Org)
		require.Zero(t, used)
		return err
	}))
}
