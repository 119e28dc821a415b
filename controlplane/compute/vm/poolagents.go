package vm

import (
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// poolAgents finds hosts that share a storage pool and whose agents do not support FeatureVolumeMigration. It reads the
// records of the hosts once, for the first VM with a volume in a shared pool. It must not be used after the transaction
// or view ends. The zero value is ready for use.
type poolAgents struct {
	read bool
	old  []*cloud.Node // hosts whose agents do not support FeatureVolumeMigration
}

// obstacle returns the reason why a VM with volumes in shared pools cannot be migrated while a host that shares one of
// the pools has an agent of an earlier version, or "" if there is no such host. Agents of earlier versions lock only one
// byte of a volume's file, which is not the byte that the target of a migration locks. Such an agent could therefore open
// a volume that the target has open. The text is the predicate of a sentence whose subject is the VM.
func (a *poolAgents) obstacle(r store.Reader, vm *cloud.VM) (string, error) {
	for _, id := range vm.Spec.Volumes() {
		v, err := volume.Lookup(r, vm.Tenant(), id)
		if err != nil {
			return "", err
		}
		if v.PoolID == "" || mutant.On(mutant.MigrateBesideOldAgent) {
			continue
		}
		if err := a.readHosts(r); err != nil {
			return "", err
		}
		for _, host := range a.old {
			if host.PoolID(v.Pool) == v.PoolID {
				return fmt.Sprintf("has the volume %s in the storage pool %s, and the agent of the host %s, which shares this "+
					"pool, is too old: upgrade this agent, or evict the host", v.Name, v.Pool, host.Name), nil
			}
		}
	}
	return "", nil
}

// readHosts reads the records of the hosts. In a transaction it reads without conflict detection, because these records
// change often.
func (a *poolAgents) readHosts(r store.Reader) error {
	if a.read {
		return nil
	}
	if tx, ok := r.(*store.Tx); ok {
		r = tx.Unguarded()
	}
	hosts, _, err := node.Nodes.List(r, 0)
	if err != nil {
		return err
	}
	for _, host := range hosts {
		if host.Value.MissingFeature([]string{cloud.FeatureVolumeMigration}) != "" {
			a.old = append(a.old, host.Value)
		}
	}
	a.read = true
	return nil
}
