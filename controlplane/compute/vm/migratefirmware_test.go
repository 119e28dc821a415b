package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestBothHostsLoseTPM ends the guest of a VM with a TPM on the source of a migration, and loses the target, after the
// switchover. Only the target knows whether it has run the guest. The source must keep the VM's files, and the VM must
// not start, until the target has answered or an operator has evicted it.
func TestBothHostsLoseTPM(t *testing.T) {
	for _, c := range []struct {
		name  string
		state cloud.MigrationState // that the target reports when it answers again, or unknown if it is evicted
		end   cloud.State
		host  string
		text  string
	}{
		{"the target has not run the guest", cloud.MigrationFailed, cloud.Error, "h1", "the guest was lost during a migration: the source has ended the guest"},
		{"the target has run the guest", cloud.MigrationRunning, cloud.Running, "h2", ""},
		{"the target is evicted", cloud.MigrationUnknown, cloud.Error, "h1", "the TPM state of the switchover, because its target was given up"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			features := map[string]string{cloud.FeatureTPM: "", cloud.FeatureFirmwareMigration: ""}
			serve := func(n *cloud.Node) { n.Features = features }
			hosts := map[string]cloud.NodeID{"h1": w.migrationHost("h1", serve)}
			source := hosts["h1"]
			id := w.create("web", func(r *CreateRequest) { r.Spec.Security.TPM = true }).ID
			w.report(id, cloud.ObservedBuilt)
			w.power(id, start, 0)
			w.report(id, cloud.ObservedRunning)
			target := w.migrationHost("h2", serve)
			hosts["h2"] = target
			began := w.toSwitchover(id, target)
			ended := func(o *cloud.Observation) { o.Observed = cloud.ObservedEnded }
			w.tell(began, source, cloud.MigrationHandedOver, ended)
			w.lose(source)
			w.stepMigrations()

			vm := w.get(id)
			require.Equal(t, []any{cloud.Migrating, target, true}, []any{vm.State, vm.Node, vm.Migration.AwaitsTarget})
			_, err := w.vms.Start(w.as(acme, ""), acme, id, [32]byte{})
			f, _ := fault.From(err)
			require.True(t, f != nil && f.Reason == ReasonAwaitsTarget, "%v", err)
			require.ErrorContains(t, err, "`trivet host evict --force`")
			_, err = w.vms.CancelMigration(w.as(acme, ""), acme, id)
			require.ErrorContains(t, err, "Only the target knows")
			require.Equal(t, vm, w.get(id))
			require.Equal(t, agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER, w.assignedTo(source, id).GetMigration().GetPhase(),
				"the source keeps the files of the VM")

			if c.state == cloud.MigrationUnknown {
				_, err := w.nodes.Evict(w.as(acme, ""), target, true)
				require.NoError(t, err)
				w.stepMigrations()
			} else {
				w.Heartbeat(target)
				w.tell(began, target, c.state)
			}
			vm = w.get(id)
			require.Equal(t, []any{c.end, hosts[c.host]}, []any{vm.State, vm.Node})
			if c.text != "" {
				require.Contains(t, vm.Status.LastError, c.text)
			}
			if vm.Node == source {
				w.power(id, start, 0)
				require.Equal(t, agentv1.Power_POWER_ON, w.assignedTo(source, id).GetPower())
				require.Equal(t, agentv1.Power_POWER_DESTROYED, w.assignedTo(target, id).GetPower())
			}
		})
	}
}
