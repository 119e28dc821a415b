package vpc

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/edge"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// externalNetworks connects the VPCs of the host to external networks. Package edge takes the state of all VPCs at once,
// so externalNetworks remembers what each VPC wants.
type externalNetworks struct {
	edge *edge.Edge // nil if the host has no external networks

	mu   sync.Mutex // guards the fields below, and is held during a call of edge
	vpcs map[cloud.VPCID]edge.VPC
	// failed has the VPCs for which the last call of edge.Set returned an error. A removed VPC may be in failed and not
	// in vpcs.
	failed map[cloud.VPCID]bool
	last   time.Time // of the last call that compared all VPCs with the kernel's state
	// withheld is true while the host must not answer for addresses that another host can take over.
	withheld bool
}

func newExternalNetworks(e *edge.Edge) externalNetworks {
	return externalNetworks{edge: e, vpcs: map[cloud.VPCID]edge.VPC{}, failed: map[cloud.VPCID]bool{}}
}

// withdraw stops answering for the addresses that another host can take over, and returns them. It stops answering at
// once. Then it waits until a running call of edge.Set has ended, and makes all later calls leave the addresses
// withdrawn.
func (o *externalNetworks) withdraw(ctx context.Context) ([]netip.Addr, error) {
	if o.edge == nil {
		return nil, nil
	}
	list, err := o.edge.Withdraw(ctx)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.withheld = true
	for id, v := range o.vpcs {
		v.Withhold = true
		o.vpcs[id] = v
	}
	o.edge.Resume()
	return list, nil
}

// restore ends the effect of withdraw for a VPC with the next call of set without edge.VPC.Withhold. Until this call,
// the addresses of the VPC stay withdrawn, because the VPC's state in o.vpcs may be older than the loss of contact.
func (o *externalNetworks) restore() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.withheld = false
}

// connected reports whether the host is connected to an external network.
func (o *externalNetworks) connected(external string) bool {
	return o.edge != nil && o.edge.Connected(external)
}

// set changes the wanted state of a VPC and returns the changes of the kernel's state. It does nothing if the VPC wants
// what it wanted before, the last call succeeded, and all VPCs were compared with the kernel's state within the last
// resyncInterval. set does not return errors of other VPCs: the workers of those VPCs try again. If the VPC has no
// connection outside and had none before, set does not return errors of the external networks either, because the VPC
// does not need them.
func (o *externalNetworks) set(ctx context.Context, vpc edge.VPC) ([]string, error) {
	if o.edge == nil {
		return nil, nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	vpc.Withhold = vpc.Withhold || o.withheld
	had, ok := o.vpcs[vpc.ID]
	if ok && !o.failed[vpc.ID] && reflect.DeepEqual(had, vpc) && time.Since(o.last) < resyncInterval {
		return nil, nil
	}
	o.vpcs[vpc.ID] = vpc
	return o.apply(ctx, vpc.ID, o.failed[vpc.ID] || connects(&vpc) || connects(&had))
}

// connects reports whether a VPC has a connection outside.
func connects(v *edge.VPC) bool { return v.NAT != nil || len(v.Gateways) > 0 || len(v.Floating) > 0 }

// remove disconnects a VPC. The VPC's namespace must still exist. After an error, remove must be called again.
func (o *externalNetworks) remove(ctx context.Context, id cloud.VPCID) error {
	if o.edge == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.vpcs[id]; !ok && !o.failed[id] {
		return nil
	}
	delete(o.vpcs, id)
	_, err := o.apply(ctx, id, true)
	return err
}

// apply applies the wanted states of all VPCs, and returns the errors of the VPC id. If needsNetworks is true, it also
// returns the errors that concern no single VPC.
func (o *externalNetworks) apply(ctx context.Context, id cloud.VPCID, needsNetworks bool) ([]string, error) {
	state := edge.State{}
	for _, id := range slices.Sorted(maps.Keys(o.vpcs)) {
		state.VPCs = append(state.VPCs, o.vpcs[id])
	}
	result, err := o.edge.Set(ctx, state)
	if err == nil {
		o.last = time.Now()
	}
	own, general := edge.ErrorsOf(err, id)
	if needsNetworks {
		own = errors.Join(own, general)
	}
	delete(o.failed, id)
	if own != nil {
		o.failed[id] = true
	}
	return result.Changes, own
}
